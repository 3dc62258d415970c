#include <array>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collectives.h"

namespace torchext {

using c10::IValue;

namespace {

std::optional<std::string> backendOf(const IValue& value, c10::Device device) {
  try {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    if (value.isString()) {
      group = c10d::resolve_process_group(value.toStringRef());
    } else if (value.isCustomClass() && isClassOfC10d(*value.type(), "ProcessGroup")) {
      group = value.toCustomClass<c10d::ProcessGroup>();
    }
    return group == nullptr ? std::nullopt : std::optional{group->getBackend(device.type())->getBackendName()};
  } catch (const c10::Error&) {
    // The group of a library that has its own registry, or no backend for the device: then the kernel raises the error.
    return std::nullopt;
  }
}

// In the order of `ReduceOp::RedOpType`.
constexpr std::array kReductions{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

std::string reductionIn(const IValue& value) {
  if (!value.isCustomClass() || !isClassOfC10d(*value.type(), "ReduceOp")) {
    return {};
  }
  const auto kind = static_cast<std::size_t>(value.toCustomClass<c10d::ReduceOp>()->op_);
  return kind < kReductions.size() ? kReductions.at(kind) : "UNUSED";
}

[[maybe_unused]] const bool is_registered = setGroupFunctions({&backendOf, &reductionIn});

}  // namespace

}  // namespace torchext
