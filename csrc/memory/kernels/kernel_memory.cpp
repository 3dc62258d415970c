#include "kernel_memory.h"

#include <string>
#include <unordered_map>

#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include "kernel_call.h"

namespace torchext {

using c10::OperatorHandle;

namespace {

using RulesByOperator = std::unordered_map<OperatorHandle, KernelRule>;

RulesByOperator resolveRules() {
  RulesByOperator rules;
  for (const auto& kind :
       {blasKernelRules(), reductionKernelRules(), sortingKernelRules(), attentionKernelRules(),
        normalizationKernelRules(), lossKernelRules(), convolutionKernelRules(), batchNormKernelRules(),
        imageKernelRules(), indexingKernelRules(), randomKernelRules(), distanceKernelRules()}) {
    for (const NamedKernelRule& entry : kind) {
      // Not every release has every operator.
      if (const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(std::string{entry.op}))) {
        rules.emplace(*op, entry.rule);
      }
    }
  }
  return rules;
}

KernelRule ruleOf(const OperatorHandle& op) {
  static const RulesByOperator rules = resolveRules();
  const auto found = rules.find(op);
  return found == rules.end() ? nullptr : found->second;
}

}  // namespace

bool hasKernelMemory(const OperatorHandle& op) {
  return ruleOf(op) != nullptr;
}

KernelMemory kernelMemoryOf(const OperatorHandle& op,
                            c10::ArrayRef<c10::IValue> arguments,
                            c10::ArrayRef<c10::IValue> results,
                            const GpuDescription& gpu) {
  const KernelRule rule = ruleOf(op);
  if (rule == nullptr) {
    return {};
  }
  KernelCall call{arguments, results, gpu};
  rule(call);
  return call.take();
}

}  // namespace torchext
