#include "composed_kernels.h"

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>

#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include "../../support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;
using c10::OperatorHandle;

namespace {

// Those of which the kernel allocates more than its results, and reads no value.
constexpr std::array<std::string_view, 14> kComposed{"aten::_euclidean_dist",
                                                     "aten::_trilinear",
                                                     "aten::affine_grid_generator",
                                                     "aten::binary_cross_entropy_with_logits",
                                                     "aten::block_diag",
                                                     "aten::count_nonzero",
                                                     "aten::dist",
                                                     "aten::isinf",
                                                     "aten::logcumsumexp",
                                                     "aten::masked_scatter",
                                                     "aten::norm.Scalar",
                                                     "aten::norm.ScalarOpt_dtype",
                                                     "aten::soft_margin_loss_backward",
                                                     "aten::soft_margin_loss_backward.grad_input"};

using KernelsByOperator = std::unordered_map<OperatorHandle, DispatchKey>;

KernelsByOperator resolve() {
  constexpr std::array kKeys{DispatchKey::CompositeExplicitAutograd,
                             DispatchKey::CompositeExplicitAutogradNonFunctional};
  KernelsByOperator kernels;
  for (const std::string_view name : kComposed) {
    const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(std::string{name}));
    for (const DispatchKey key : kKeys) {
      // Not every release has every operator.
      if (op && op->hasKernelForDispatchKey(key)) {
        kernels.emplace(*op, key);
      }
    }
  }
  return kernels;
}

}  // namespace

std::optional<DispatchKey> composedKernelOnCuda(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  static const KernelsByOperator kernels = resolve();
  const auto found = kernels.find(op);
  const auto is_on_cuda = [](const at::Tensor& tensor) { return tensor.is_cuda(); };
  if (found == kernels.end() || !hasTensor(arguments, is_on_cuda)) {
    return std::nullopt;
  }
  return found->second;
}

}  // namespace torchext
