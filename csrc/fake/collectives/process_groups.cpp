#include "process_groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace torchext {

using c10::IValue;

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

GroupPtr findByName(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return nullptr;  // the group of a library that has a registry of its own
  }
}

GroupPtr groupOf(const IValue& value) {
  if (value.isString()) {
    return findByName(value.toStringRef());
  }
  return value.isCustomClass() && isProcessGroup(*value.type()) ? value.toCustomClass<c10d::ProcessGroup>() : nullptr;
}

std::optional<std::string> backendOf(const IValue& value, c10::Device device) {
  const GroupPtr group = groupOf(value);
  if (group == nullptr) {
    return std::nullopt;
  }
  try {
    return group->getBackend(device.type())->getBackendName();
  } catch (const c10::Error&) {
    return group->getBackendName();  // it has no backend for the device
  }
}

[[maybe_unused]] const bool is_registered = setBackendOfGroup(&backendOf);

}  // namespace

}  // namespace torchext
