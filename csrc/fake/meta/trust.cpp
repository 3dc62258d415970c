#include "trust.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "../../support/stack_utils.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;

namespace {

struct Entry {
  std::string_view op;  // with all of its overloads
  Trust trust;
};

constexpr std::array kTable{
    // Workspaces of oneDNN, weights in the order of a library, alpha of `ctc_loss`, lengths, bags.
    Entry{"aten::mkldnn_rnn_layer_backward", Trust::kBuffers},
    Entry{"aten::_convert_weight_to_int4pack", Trust::kBuffers},
    Entry{"aten::_convert_weight_to_int4pack_for_cpu", Trust::kBuffers},
    Entry{"aten::_dyn_quant_matmul_4bit", Trust::kBuffers},
    Entry{"aten::_dyn_quant_pack_4bit_weight", Trust::kBuffers},
    Entry{"aten::_weight_int4pack_mm", Trust::kBuffers},
    Entry{"aten::_weight_int4pack_mm_for_cpu", Trust::kBuffers},
    Entry{"aten::_weight_int4pack_mm_with_scales_and_zeros", Trust::kBuffers},
    Entry{"aten::_weight_int8pack_mm", Trust::kBuffers},
    Entry{"aten::_ctc_loss_backward", Trust::kBuffers},
    Entry{"aten::_segment_reduce_backward", Trust::kBuffers},
    Entry{"aten::_embedding_bag_backward", Trust::kBuffers},
    Entry{"aten::_embedding_bag_dense_backward", Trust::kBuffers},
    Entry{"aten::_embedding_bag_per_sample_weights_backward", Trust::kBuffers},
    Entry{"aten::convolution_backward", Trust::kBuffers},
    Entry{"aten::convolution_backward_overrideable", Trust::kBuffers},
    Entry{"aten::_slow_conv2d_backward", Trust::kBuffers},
    Entry{"aten::_grid_sampler_2d_cpu_fallback_backward", Trust::kBuffers},
    Entry{"aten::_nnpack_spatial_convolution", Trust::kBuffers},
    Entry{"aten::masked_scatter_backward", Trust::kBuffers},
    // Numbers of elements and windows.
    Entry{"aten::native_group_norm", Trust::kSizes},
    Entry{"aten::native_group_norm_backward", Trust::kSizes},
    Entry{"aten::_fft_c2r", Trust::kSizes},
    Entry{"aten::_cdist_backward", Trust::kSizes},
    Entry{"aten::_pdist_backward", Trust::kSizes},
    Entry{"aten::unfold_backward", Trust::kSizes},
    Entry{"aten::slice_backward", Trust::kSizes},
    Entry{"aten::select_backward", Trust::kSizes},
    Entry{"aten::diagonal_backward", Trust::kSizes},
    // Positions of maxima, classes and rows.
    Entry{"aten::max_pool2d_with_indices_backward", Trust::kIndices},
    Entry{"aten::max_pool3d_with_indices_backward", Trust::kIndices},
    Entry{"aten::adaptive_max_pool2d_backward", Trust::kIndices},
    Entry{"aten::adaptive_max_pool3d_backward", Trust::kIndices},
    Entry{"aten::fractional_max_pool2d_backward", Trust::kIndices},
    Entry{"aten::fractional_max_pool3d_backward", Trust::kIndices},
    Entry{"aten::embedding_dense_backward", Trust::kIndices},
    Entry{"aten::nll_loss_backward", Trust::kIndices},
    Entry{"aten::nll_loss2d_backward", Trust::kIndices},
    Entry{"aten::multi_margin_loss_backward", Trust::kIndices},
    Entry{"aten::multilabel_margin_loss_backward", Trust::kIndices},
    Entry{"aten::batch_norm_backward", Trust::kStatistics},
    Entry{"aten::native_batch_norm_backward", Trust::kStatistics},
    // Dtypes of statistics and of half-precision results; `log_sigmoid_forward_cuda()` returns an empty buffer.
    Entry{"aten::log_sigmoid_backward", Trust::kForward},
    Entry{"aten::native_layer_norm_backward", Trust::kForward},
    Entry{"aten::_softmax_backward_data", Trust::kForward},
    Entry{"aten::_log_softmax_backward_data", Trust::kForward},
    Entry{"aten::_masked_softmax_backward", Trust::kForward},
    Entry{"aten::_weight_norm_interface_backward", Trust::kForward},
    Entry{"aten::_scaled_dot_product_flash_attention_for_cpu_backward", Trust::kForward},
    Entry{"aten::_prelu_kernel_backward", Trust::kForward},
};

bool haveElements(c10::ArrayRef<c10::IValue> arguments) {
  return !hasTensor(arguments, [](const Tensor& tensor) { return tensor.numel() == 0; });
}

bool areOnCpu(c10::ArrayRef<c10::IValue> arguments) {
  return !hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_cuda(); });
}

// (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, is_training, ...). What the forward has
// saved is read in training only, and empty otherwise.
bool haveStatistics(c10::ArrayRef<c10::IValue> arguments) {
  constexpr std::size_t kFirst = 2;
  constexpr std::size_t kSaved = 5;
  constexpr std::size_t kIsTraining = 7;
  const Tensor& input = arguments[1].toTensor();
  const std::size_t end = arguments[kIsTraining].toBool() ? kIsTraining : kSaved;
  return input.dim() > 1 && !hasTensor(arguments.slice(kFirst, end - kFirst),
                                       [&input](const Tensor& tensor) { return tensor.numel() != input.size(1); });
}

}  // namespace

Trust trustOf(const OperatorHandle& op) {
  const auto* const found =
      std::find_if(kTable.begin(), kTable.end(), [&op](const Entry& entry) { return entry.op == op.schema().name(); });
  return found == kTable.end() ? Trust::kNothing : found->trust;
}

bool mayBeTriedOut(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  switch (trustOf(op)) {
    case Trust::kBuffers:
      return false;
    case Trust::kIndices:
      return haveElements(arguments) && areOnCpu(arguments);
    case Trust::kStatistics:
      return haveStatistics(arguments) && areOnCpu(arguments);
    case Trust::kSizes:
    case Trust::kForward:
      return areOnCpu(arguments);
    case Trust::kNothing:
      break;
  }
  return true;
}

}  // namespace torchext
