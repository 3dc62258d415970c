#include "composed_kernels.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>

#include "../../support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;
using c10::OperatorHandle;

namespace {

// Those of which the kernel allocates more than its results, and reads no value.
constexpr std::array<std::string_view, 14> kComposed{"_euclidean_dist",
                                                     "_trilinear",
                                                     "affine_grid_generator",
                                                     "binary_cross_entropy_with_logits",
                                                     "block_diag",
                                                     "count_nonzero",
                                                     "dist",
                                                     "isinf",
                                                     "logcumsumexp",
                                                     "masked_scatter",
                                                     "norm.Scalar",
                                                     "norm.ScalarOpt_dtype",
                                                     "soft_margin_loss_backward",
                                                     "soft_margin_loss_backward.grad_input"};

using KernelsByOperator = std::unordered_map<OperatorHandle, DispatchKey>;

KernelsByOperator resolve() {
  constexpr std::array kKeys{DispatchKey::CompositeExplicitAutograd,
                             DispatchKey::CompositeExplicitAutogradNonFunctional};
  KernelsByOperator kernels;
  for (const std::string_view name : kComposed) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    const std::string overload{name.substr(std::min(dot + 1, name.size()))};
    const auto op = c10::Dispatcher::singleton().findOp({"aten::" + std::string{name.substr(0, dot)}, overload});
    for (const DispatchKey key : kKeys) {
      // Not every release has every operator.
      if (op && op->hasKernelForDispatchKey(key)) {
        kernels.emplace(*op, key);
      }
    }
  }
  return kernels;
}

bool isOnCuda(c10::ArrayRef<c10::IValue> arguments) {
  bool is_any = false;
  forEachTensor(arguments, [&is_any](const at::Tensor& tensor) { is_any = is_any || tensor.is_cuda(); });
  return is_any;
}

}  // namespace

std::optional<DispatchKey> composedKernelOnCuda(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  static const KernelsByOperator kernels = resolve();
  const auto found = kernels.find(op);
  if (found == kernels.end() || !isOnCuda(arguments)) {
    return std::nullopt;
  }
  return found->second;
}

}  // namespace torchext
