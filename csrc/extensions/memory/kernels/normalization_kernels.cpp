// Normalization, softmax, dropout, recurrent cells, norms of lists of tensors, and copies before a resize.

#include <array>
#include <optional>
#include <vector>

#include <ATen/EmptyTensor.h>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

// Copies the first argument after allocating the results: `host_softmax()` and others.
void copyFirst(KernelCall& call) {
  call.allocateResults();
  call.free(call.copyUnlessContiguous(call.tensor(0)));
}

// Copies the gradient and the output: `host_softmax_backward()`.
void copyBoth(KernelCall& call) {
  call.allocateResults();
  const BlockNumber gradient = call.copyUnlessContiguous(call.tensor(0));
  const BlockNumber output = call.copyUnlessContiguous(call.tensor(1));
  call.free({output, gradient});
}

constexpr std::int64_t kDimsOfImages = 4;  // may be channels last

// `group_norm_kernel.cu`: a factor and a summand for each channel of each sample.
void groupNorm(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const BlockNumber copy = self.is_contiguous(self.suggest_memory_format()) ? -1 : call.copy(self);
  call.allocateResults();
  const std::int64_t samples = call.argument(3).toInt();
  const std::int64_t channels = call.argument(4).toInt();
  const std::int64_t positions = call.argument(5).toInt();
  const std::int64_t groups = call.argument(6).toInt();
  // In half precision, the moments are rounded at the end.
  const bool is_rounded = accumulatorBytes(self.scalar_type()) != toSigned(self.element_size());
  const std::int64_t of_moments = is_rounded ? samples * groups * accumulatorBytes(self.scalar_type()) : 0;
  const BlockNumber mean = call.allocate(of_moments);
  const BlockNumber deviation = call.allocate(of_moments);
  const bool is_flat = positions == 1 && self.dim() < kDimsOfImages;
  const bool is_last = self.suggest_memory_format() != at::MemoryFormat::Contiguous;
  if (self.numel() > 0 && !is_flat && (is_last || positions == 1 || call.has(1) || call.has(2))) {
    const BlockNumber factor = call.allocate(samples * channels * accumulatorBytes(self.scalar_type()));
    const BlockNumber summand = call.allocate(samples * channels * accumulatorBytes(self.scalar_type()));
    call.free({summand, factor});
  }
  call.free({deviation, mean, copy});
}

void groupNormBackward(KernelCall& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& self = call.tensor(1);
  const at::MemoryFormat format = self.suggest_memory_format();
  const BlockNumber copy = gradient.is_contiguous(format) ? -1 : call.copy(gradient);
  call.allocateResults();
  const std::int64_t samples = call.argument(5).toInt();
  const std::int64_t channels = call.argument(6).toInt();
  const std::int64_t positions = call.argument(7).toInt();
  const std::int64_t of_groups = samples * call.argument(8).toInt() * accumulatorBytes(self.scalar_type());
  const std::int64_t of_channels = samples * channels * accumulatorBytes(self.scalar_type());
  const auto wanted = call.argument(9).toBoolList();
  const bool is_flat = positions == 1 && self.dim() < kDimsOfImages;
  const BlockNumber products = is_flat ? -1 : call.allocate(of_channels);
  const BlockNumber sums = is_flat ? -1 : call.allocate(of_channels);
  if (positions == 1) {
    const BlockNumber first = wanted[0] ? call.allocate(of_groups) : -1;
    const BlockNumber second = wanted[0] ? call.allocate(of_groups) : -1;
    call.free({second, first, sums, products, copy});
    return;
  }
  if (wanted[0]) {
    const BlockNumber second = call.allocate(of_groups);
    const BlockNumber third = call.allocate(of_groups);
    const bool has_factors = call.has(4) && format == at::MemoryFormat::Contiguous;
    const BlockNumber first = has_factors ? call.allocate(of_channels) : -1;
    call.free({third, second, first});
  }
  call.free({sums, products, copy});
}

// `layer_norm_cuda()` and its backward in layer_norm_kernel.cu.
void layerNorm(KernelCall& call) {
  const BlockNumber copy = call.copyUnlessContiguous(call.tensor(0));
  call.allocateResults();
  call.free(copy);
}

void layerNormBackward(KernelCall& call) {
  const BlockNumber input = call.copyUnlessContiguous(call.tensor(1));
  call.allocateResults();
  const BlockNumber gradient = call.copyUnlessContiguous(call.tensor(0));
  call.free({gradient, input});
}

// The product of gradient and output has the strides of the gradient and is summed.
void softmaxBackward(KernelCall& call) {
  call.allocateResults();
  const BlockNumber product = call.copy(call.tensor(0));
  const BlockNumber copy = call.copyUnlessContiguous(call.tensor(0));
  const BlockNumber output = call.copyUnlessContiguous(call.tensor(1));
  call.free({output, copy, product});
}

// `_safe_softmax()` in Attention.cpp of ATen/native/transformers: fully masked rows become zeros.
void safeSoftmax(KernelCall& call) {
  copyFirst(call);
  const Tensor& self = call.tensor(0);
  if (self.dim() == 0) {
    return;
  }
  const std::int64_t dim = call.argument(1).toInt();
  const BlockNumber is_masked = call.allocate(self.numel());
  const Tensor mask = at::detail::empty_strided_meta(self.sizes(), self.strides(), at::kBool);
  c10::DimVector sizes{self.sizes()};
  sizes[toSize(dim < 0 ? dim + self.dim() : dim)] = 1;
  const Tensor rows = at::detail::empty_meta(sizes, at::kBool);
  const BlockNumber are_masked = call.allocate(rows.numel());
  const std::array<std::int64_t, 1> dims{dim};
  reduceOnGpu(call, {mask, rows, c10::OptionalIntArrayRef{dims}, /*keepdim=*/true, 1});
  const BlockNumber zero = call.allocate(toSigned(self.element_size()));
  call.free({zero, are_masked, is_masked});
}

// `logsumexp_out_impl()`: the maxima, a mask of infinite ones, and the sums of the exponentials.
void logSumExp(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  if (!self.is_floating_point() || self.numel() == 0 || self.dim() == 0) {
    return;
  }
  const std::vector<std::int64_t> dims = call.argument(1).toIntVector();
  const bool keepdim = call.argument(2).toBool();
  const Tensor& result = call.result();
  const auto element = toSigned(self.element_size());
  const BlockNumber maxima = call.copy(result);
  c10::DimVector sizes{self.sizes()};
  for (const std::int64_t dim : dims) {
    sizes[toSize(dim < 0 ? dim + self.dim() : dim)] = 1;
  }
  const Tensor kept = at::detail::empty_meta(sizes, self.scalar_type());
  reduceOnGpu(call, {self, kept, c10::OptionalIntArrayRef{dims}, /*keepdim=*/true, element});
  const BlockNumber magnitudes = call.copy(result);
  const BlockNumber are_infinite = call.allocate(result.numel());
  call.free({are_infinite, magnitudes});
  const BlockNumber exponentials = call.copy(self);
  call.allocateResult(0);
  reduceOnGpu(call, {self, result, c10::OptionalIntArrayRef{dims}, keepdim, accumulatorBytes(self.scalar_type())});
  call.free({exponentials, maxima});
}

void maskFirst(KernelCall& call) {
  call.allocateResults({1, 0});
}

void workspaceFirst(KernelCall& call) {
  call.allocateResults({2, 0, 1});
}

// `upsample_*_backward`: copies the gradient into a memory format that the kernel supports.
void copyForFormat(KernelCall& call) {
  call.allocateResults();
  const Tensor& gradient = call.tensor(0);
  call.free(gradient.is_contiguous(gradient.suggest_memory_format()) ? -1 : call.copy(gradient));
}

// ForeachReduceOp.cu: each chunk is reduced to a number, and these to one number per tensor.
void normsOfList(KernelCall& call) {
  constexpr std::int64_t kChunk = 65536;
  const std::vector<Tensor> tensors = call.argument(0).toTensorVector();
  std::int64_t chunks = 0;
  for (const Tensor& tensor : tensors) {
    chunks += (tensor.numel() + kChunk - 1) / kChunk;
  }
  const auto count = toSigned(tensors.size());
  const std::int64_t size = tensors.empty() ? 0 : accumulatorBytes(tensors.front().scalar_type());
  const BlockNumber offsets = call.allocate((count + 1) * 8);
  const BlockNumber norms = call.allocate(chunks * size);
  call.allocateResults();
  call.free({norms, offsets});
}

const KernelRules kNormalizationRules{
    {groupNorm, {"aten::native_group_norm"}},
    {groupNormBackward, {"aten::native_group_norm_backward"}},
    {layerNorm, {"aten::native_layer_norm"}},
    {layerNormBackward, {"aten::native_layer_norm_backward"}},
    {copyFirst, {"aten::_softmax", "aten::_log_softmax"}},
    {softmaxBackward, {"aten::_softmax_backward_data"}},
    {copyBoth, {"aten::_log_softmax_backward_data"}},
    {safeSoftmax, {"aten::_safe_softmax"}},
    {logSumExp, {"aten::logsumexp"}},
    {maskFirst, {"aten::native_dropout", "aten::_thnn_fused_gru_cell", "aten::nll_loss2d_forward"}},
    {workspaceFirst, {"aten::_thnn_fused_lstm_cell"}},
    {copyForFormat,
     {"aten::upsample_nearest2d_backward", "aten::_upsample_nearest_exact2d_backward",
      "aten::upsample_bilinear2d_backward"}},
    {normsOfList, {"aten::_foreach_norm.Scalar"}},
};

}  // namespace

}  // namespace torchext
