#include "process_groups.h"

#include <array>

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
    return nullptr;  // the group of a library that has its own registry
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
    return std::nullopt;  // no backend for the device; the kernel raises the error
  }
}

// In the order of `ReduceOp::RedOpType`.
constexpr std::array kReductions{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

std::string reductionIn(const IValue& value) {
  const auto* named = value.isCustomClass() ? dynamic_cast<const c10::NamedType*>(&*value.type()) : nullptr;
  if (named == nullptr || !named->name() || named->name()->qualifiedName() != "__torch__.torch.classes.c10d.ReduceOp") {
    return {};
  }
  const auto kind = static_cast<std::size_t>(value.toCustomClass<c10d::ReduceOp>()->op_);
  return kind < kReductions.size() ? kReductions.at(kind) : "UNUSED";
}

[[maybe_unused]] const bool is_registered = setBackendOfGroup(&backendOf) && setNameOfReduction(&reductionIn);

}  // namespace

}  // namespace torchext
