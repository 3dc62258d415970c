#include "kernel_memory.h"

#include "kernel_call.h"

namespace torchext {

using c10::OperatorHandle;

namespace {

OperatorTable<KernelRule>& ruleOf() {
  static auto* rules = new OperatorTable<KernelRule>{
      "allocate on CUDA besides their results: NOTE [Allocations of kernels]", {}, Overloads::kNamed};
  return *rules;
}

}  // namespace

KernelRules::KernelRules(std::initializer_list<OperatorTable<KernelRule>::Group> rules) {
  ruleOf().add(rules);
}

bool hasKernelMemory(const OperatorHandle& op) {
  return ruleOf()(op) != nullptr;
}

KernelMemory kernelMemoryOf(const OperatorHandle& op,
                            c10::ArrayRef<c10::IValue> arguments,
                            c10::ArrayRef<c10::IValue> results,
                            const GpuDescription& gpu) {
  const KernelRule rule = ruleOf()(op);
  if (rule == nullptr) {
    return {};
  }
  KernelCall call{arguments, results, gpu};
  rule(call);
  return call.take();
}

}  // namespace torchext
