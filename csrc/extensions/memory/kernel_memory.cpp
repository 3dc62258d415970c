#include "kernel_memory.h"

#include <atomic>

#include "../../libraries/support/locks.h"
#include "../../libraries/support/operator_table.h"

namespace torchext {

using c10::OperatorHandle;

namespace {

std::atomic<KernelRules> kernel_rules{nullptr};

OperatorGroups& operatorsWithRules() {
  static auto* operators =
      new OperatorGroups{"allocate on CUDA besides their results: NOTE [Allocations of kernels]", Overloads::kNamed};
  return *operators;
}

}  // namespace

void setKernelRules(const std::vector<std::string>& operators, KernelRules rules) {
  if (kernel_rules.load() == nullptr) {
    operatorsWithRules().add(operators);
    kernel_rules.store(rules);  // after the names, which other threads look up
  }
}

bool hasKernelMemory(const OperatorHandle& op) {
  return kernel_rules.load(std::memory_order_acquire) != nullptr && operatorsWithRules().find(op) >= 0;
}

KernelMemory kernelMemoryOf(const OperatorHandle& op,
                            c10::ArrayRef<c10::IValue> arguments,
                            c10::ArrayRef<c10::IValue> results,
                            const GpuDescription& gpu) {
  checkMayNeedInterpreter();
  return kernel_rules.load(std::memory_order_acquire)(op, arguments, results, gpu);
}

}  // namespace torchext
