#include "composed_kernels.h"

#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;

namespace {

const OperatorSet isComposed{
    "are composed of others on CUDA, where their kernels allocate temporary buffers and read no values",
    {"aten::_euclidean_dist", "aten::_trilinear", "aten::affine_grid_generator",
     "aten::binary_cross_entropy_with_logits", "aten::block_diag", "aten::count_nonzero", "aten::dist", "aten::isinf",
     "aten::logcumsumexp", "aten::masked_scatter", "aten::norm.Scalar", "aten::norm.ScalarOpt_dtype",
     "aten::soft_margin_loss_backward", "aten::soft_margin_loss_backward.grad_input"},
    Overloads::kNamed};

}  // namespace

std::optional<DispatchKey> composedKernelOnCuda(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_on_cuda = [](const at::Tensor& tensor) { return tensor.is_cuda(); };
  if (isComposed(op) && !isRecording() && hasTensor(arguments, is_on_cuda)) {
    for (const DispatchKey key :
         {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional}) {
      if (op.hasKernelForDispatchKey(key)) {
        return key;
      }
    }
  }
  return std::nullopt;
}

}  // namespace torchext
