#include "zero_tensors.h"

#include <array>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_efficientzerotensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;

namespace {

bool hasZeroTensor(ArrayRef<IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor._is_zerotensor(); });
}

}  // namespace

std::optional<DispatchKey> kernelForZeroTensors(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr DispatchKey kComposite = DispatchKey::CompositeExplicitAutograd;
  return op.hasKernelForDispatchKey(kComposite) && !onlyMakesViews(op) && hasZeroTensor(arguments)
             ? std::optional{kComposite}
             : std::nullopt;
}

// `dot()` and `vdot()` in Blas.cpp.
void correctForZeroTensors(const OperatorHandle& op, ArrayRef<IValue> arguments, torch::jit::Stack& results) {
  constexpr std::array<std::string_view, 2> kReturnZeros{"aten::dot", "aten::vdot"};
  if (isAmong(kReturnZeros, op.operator_name().name) && hasZeroTensor(arguments)) {
    const Tensor& meta = results.front().toTensor();
    results.front() = at::_efficientzerotensor(meta.sizes(), meta.options());
  }
}

}  // namespace torchext
