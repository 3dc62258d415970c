#include "kernel_results.h"

#include <cstdint>

#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/DimVector.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/torch_compat.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

// The storage of the result has an element for each of the broadcast inputs.
template <std::size_t Reduction>
void keepLosses(const c10::OperatorHandle& /*op*/, Arguments arguments, Stack& results) {
  const Tensor& result = results[0].toTensor();
  if (arguments[Reduction].toInt() == at::Reduction::None || !isFake(result)) {
    return;
  }
  const c10::DimVector sizes =
      at::infer_size_dimvector(arguments[0].toTensor().sizes(), arguments[1].toTensor().sizes());
  const auto nbytes = toSize(c10::multiply_integers(sizes) * result.element_size());
  if (nbytes > result.storage().nbytes()) {
    resizeFakeStorage(result.storage(), nbytes);
  }
}

// The result was like the first argument before it was resized (`col2im_cpu()`, `im2col_cuda()`), and storages do not
// shrink.
void keepFirst(const c10::OperatorHandle& /*op*/, Arguments arguments, Stack& results) {
  const Tensor& first = arguments[0].toTensor();
  const Tensor& result = results[0].toTensor();
  const auto nbytes = toSize(first.numel() * toSigned(first.element_size()));
  if (isFake(result) && nbytes > result.storage().nbytes()) {
    resizeFakeStorage(result.storage(), nbytes);
  }
}

// A periodic window is the start of a window with one more element (`kaiser_window()`, TensorFactories.cpp).
void keepPeriod(const c10::OperatorHandle& op, Arguments arguments, Stack& results) {
  const Tensor& window = results[0].toTensor();
  const int periodic = findArgument(op.schema(), "periodic");
  const bool is_periodic = periodic < 0 || arguments[toSize(periodic)].toBool();
  const auto nbytes = toSize(window.numel() + 1) * window.itemsize();
  if (isFake(window) && is_periodic && window.numel() > 1 && nbytes > window.storage().nbytes()) {
    resizeFakeStorage(window.storage(), nbytes);
  }
}

// `log_sigmoid_forward_cuda()` saves nothing for the backward pass.
void emptyBuffer(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/, Stack& results) {
  const Tensor& buffer = results[1].toTensor();
  if (isFake(buffer) && buffer.is_cuda()) {
    const FakeFactoriesGuard guard;
    results[1] = at::empty({0}, buffer.options());
  }
}

void moveStateOfGenerator(const c10::OperatorHandle& op, Arguments arguments, Stack& results) {
  const auto dropout = toSize(findArgument(op.schema(), "dropout_p"));
  if (arguments[dropout].toDouble() == 0 && !compat::applies("attention_state_on_cpu")) {
    return;
  }
  for (const std::size_t i : {std::size_t{2}, std::size_t{3}}) {
    const Tensor& state = results[i].toTensor();
    if (isFake(state) && state.is_cuda()) {
      const FakeFactoriesGuard guard;
      results[i] = at::empty(state.sizes(), state.options().device(c10::kCPU));
    }
  }
}

// Attention weights are undefined unless they are requested (`native_multi_head_attention_cpu()`, attention.cpp).
void dropWeights(const c10::OperatorHandle& /*op*/, Arguments arguments, Stack& results) {
  constexpr std::size_t kNeedWeights = 10;
  if (!arguments[kNeedWeights].toBool()) {
    results[1] = Tensor{};
  }
}

// Only oneDNN can compute the size of the workspace.
void sizeWorkspace(const c10::OperatorHandle& op, Arguments arguments, Stack& results) {
  constexpr std::size_t kWorkspace = 3;
  const Tensor& output = results[0].toTensor();
  if (!c10::GradMode::is_enabled()) {
    results[kWorkspace] = Tensor{};
  } else if (const auto on_zeros = hooks().trials.runOnZeros(op, arguments.vec(), output.device())) {
    results[kWorkspace] = (*on_zeros)[kWorkspace];
  } else if (isRecording()) {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("Cannot determine the workspace size of `", op.operator_name(), "`."));
  }
}

using Complete = void (*)(const c10::OperatorHandle& op, Arguments arguments, Stack& results);

const OperatorTable<Complete> completionOf{
    "have results that their Meta kernels do not describe completely",
    {
        {keepLosses<2>, {"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"}},
        {keepLosses<3>, {"aten::binary_cross_entropy"}},
        {sizeWorkspace, {"aten::mkldnn_rnn_layer"}},
        {keepFirst, {"aten::im2col", "aten::col2im"}},
        {keepPeriod, {"aten::kaiser_window"}},
        {emptyBuffer, {"aten::log_sigmoid_forward"}},
        {dropWeights, {"aten::_native_multi_head_attention"}},
        {moveStateOfGenerator, {"aten::_scaled_dot_product_efficient_attention", "aten::_efficient_attention_forward"}},
    }};

}  // namespace

void completeResults(const c10::OperatorHandle& op, Arguments arguments, Stack& results) {
  if (const Complete complete = completionOf(op); complete != nullptr && !hasOut(op)) {
    complete(op, arguments, results);
  }
}

}  // namespace torchext
