#include "trust.h"

#include <ATen/core/Tensor.h>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

bool haveElements(c10::ArrayRef<c10::IValue> arguments) {
  return !hasTensor(arguments, [](const Tensor& tensor) { return tensor.numel() == 0; });
}

bool areOnCpu(c10::ArrayRef<c10::IValue> arguments) {
  return !hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_cuda(); });
}

// (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, is_training, ...). The values that the
// forward operator saved are read only in training, and are empty otherwise.
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

const OperatorTable<Trust> trustOf{
    "have kernels that trust results of an earlier call",
    {
        {Trust::kBuffers,
         {"aten::mkldnn_rnn_layer_backward",
          "aten::_convert_weight_to_int4pack",
          "aten::_convert_weight_to_int4pack_for_cpu",
          "aten::_dyn_quant_matmul_4bit",
          "aten::_dyn_quant_pack_4bit_weight",
          "aten::_weight_int4pack_mm",
          "aten::_weight_int4pack_mm_for_cpu",
          "aten::_weight_int4pack_mm_with_scales_and_zeros",
          "aten::_weight_int8pack_mm",
          "aten::_ctc_loss_backward",
          "aten::_segment_reduce_backward",
          "aten::_embedding_bag_backward",
          "aten::_embedding_bag_dense_backward",
          "aten::_embedding_bag_per_sample_weights_backward",
          "aten::convolution_backward",
          "aten::convolution_backward_overrideable",
          "aten::_slow_conv2d_backward",
          "aten::_grid_sampler_2d_cpu_fallback_backward",
          "aten::_nnpack_spatial_convolution",
          "aten::masked_scatter_backward"}},
        {Trust::kSizes,
         {"aten::native_group_norm", "aten::native_group_norm_backward", "aten::_fft_c2r", "aten::_cdist_backward",
          "aten::_pdist_backward", "aten::unfold_backward", "aten::slice_backward", "aten::select_backward",
          "aten::diagonal_backward"}},
        {Trust::kIndices,
         {"aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward",
          "aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward",
          "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward",
          "aten::embedding_dense_backward", "aten::nll_loss_backward", "aten::nll_loss2d_backward",
          "aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward"}},
        {Trust::kSegments, {"aten::segment_reduce"}},
        {Trust::kStatistics, {"aten::batch_norm_backward", "aten::native_batch_norm_backward"}},
        {Trust::kForward,
         {"aten::log_sigmoid_backward", "aten::native_layer_norm_backward", "aten::_softmax_backward_data",
          "aten::_log_softmax_backward_data", "aten::_masked_softmax_backward", "aten::_weight_norm_interface_backward",
          "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_prelu_kernel_backward"}},
    }};

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
    case Trust::kSegments:  // the kernel checks all lengths: see `skipsChecks()`
    case Trust::kNothing:
      break;
  }
  return true;
}

}  // namespace torchext
