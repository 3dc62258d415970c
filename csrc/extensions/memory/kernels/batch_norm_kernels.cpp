// Batch normalization by PyTorch's native kernels: Normalization.cu in ATen/native/cuda.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/EmptyTensor.h>

#include "../../../core/support/sizes.h"
#include "arithmetic.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

constexpr std::int64_t kChannels = 1;  // the dimension

bool isFlatWithChannelsLast(const Tensor& tensor) {
  return tensor.is_contiguous() && tensor.stride(kChannels) == 1;
}

// Whether the channels-last kernels read a tensor: for the statistics in two dimensions only
// (`batch_norm_choose_impl()`), for the gradients also in three (`batch_norm_use_channels_last_kernels()`).
bool statisticsAreChannelsLast(const Tensor& tensor) {
  return tensor.is_contiguous() ? isFlatWithChannelsLast(tensor) : tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
}

bool gradientsAreChannelsLast(const Tensor& tensor) {
  return tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ||
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d) || isFlatWithChannelsLast(tensor);
}

// `flexible_launch_configs()`: the numbers of blocks along the channels and along the other dimensions.
struct Launch {
  std::int64_t blocks_of_channels;
  std::int64_t blocks_of_others;

  explicit Launch(const Tensor& tensor) {
    constexpr std::int64_t kThreads = 512;
    constexpr std::int64_t kTile = 32;
    constexpr std::int64_t kValues = 16;  // per thread
    constexpr std::int64_t kMaxBlocks = 128;
    constexpr std::int64_t kMinBlocks = 8;  // with fewer, one block is used
    const std::int64_t channels = tensor.size(kChannels);
    const std::int64_t values = tensor.numel() / channels;
    std::int64_t width = std::min(lastPowerOf2(channels), kTile);
    const std::int64_t height = std::min(lastPowerOf2(divideRoundingUp(values, kValues)), kThreads / width);
    if (width * height != kThreads) {
      width = std::min(lastPowerOf2(channels), kThreads / height);
    }
    blocks_of_channels = divideRoundingUp(channels, width);
    const std::int64_t blocks = std::min(divideRoundingUp(values, height * kValues), kMaxBlocks);
    blocks_of_others = blocks < kMinBlocks ? 1 : blocks;
  }
};

// The blocks of the same channels combine their results in a buffer with `count` numbers per block and channel.
void meetInBuffer(KernelCall& call, const Tensor& tensor, std::int64_t count) {
  const Launch launch{tensor};
  if (launch.blocks_of_others > 1) {
    const std::int64_t numbers = count * tensor.size(kChannels) * launch.blocks_of_others;
    const BlockNumber buffer = call.allocate(numbers * accumulatorBytes(tensor.scalar_type()));
    const BlockNumber semaphores = call.allocate(launch.blocks_of_channels * toSigned(sizeof(int)));
    call.free({semaphores, buffer});
  }
}

// `var_mean()` over all dimensions but the channels, computed in float.
void meanAndVariance(KernelCall& call, const Tensor& self) {
  const std::vector<std::int64_t> dims = dimsBut(self, kChannels);
  const bool is_cast = accumulatorBytes(self.scalar_type()) != toSigned(self.element_size());
  const BlockNumber cast = is_cast ? call.allocate(self.numel() * accumulatorBytes(self.scalar_type())) : -1;
  const Tensor input =
      at::detail::empty_strided_meta(self.sizes(), self.strides(), is_cast ? at::kFloat : self.scalar_type());
  const Tensor mean = at::detail::empty_meta({self.size(kChannels)}, input.scalar_type());
  reduceOnGpu(call, {input,
                     {mean, mean},
                     c10::OptionalIntArrayRef{dims},
                     /*keepdim=*/false,
                     4 * accumulatorBytes(self.scalar_type()),
                     2});
  call.free(cast);
}

void batchNorm(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  call.allocateResults();
  constexpr std::size_t kTrains = 5;
  if (self.numel() == 0 || !call.argument(kTrains).toBool()) {
    return;
  }
  if (statisticsAreChannelsLast(self)) {
    meetInBuffer(call, self, 4);
  } else if (!self.is_contiguous()) {
    meanAndVariance(call, self);
  }
}

// `batch_norm_backward_cuda_template()` reads [sample, channel, position].
BlockNumber copyUnlessFlat(KernelCall& call, const Tensor& tensor) {
  std::int64_t expected = -1;
  for (std::int64_t dim = tensor.dim() - 1; dim > kChannels; --dim) {
    if (tensor.size(dim) == 1) {
      continue;
    }
    if (expected >= 0 && tensor.stride(dim) != expected) {
      return call.copy(tensor);
    }
    expected = tensor.stride(dim) * tensor.size(dim);
  }
  return -1;
}

void batchNormBackward(KernelCall& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& self = call.tensor(1);
  constexpr std::size_t kWanted = 9;
  const auto wanted = call.argument(kWanted).toBoolList();
  const bool is_last = gradientsAreChannelsLast(self);
  if (self.numel() == 0 || !wanted[0]) {
    return;
  }
  constexpr std::size_t kTrains = 7;
  if (!call.argument(kTrains).toBool() && !wanted[1] && !wanted[2]) {
    return;
  }
  if (!is_last) {
    const BlockNumber input = copyUnlessFlat(call, self);
    const BlockNumber copy = copyUnlessFlat(call, gradient);
    call.allocateResults();
    call.free({copy, input});
    return;
  }
  const std::int64_t of_sum = self.size(kChannels) * accumulatorBytes(self.scalar_type());
  const BlockNumber sums = call.allocate(of_sum);
  const BlockNumber products = call.allocate(of_sum);
  if (wanted[1]) {
    call.allocateResult(1);
  }
  if (wanted[2]) {
    call.allocateResult(2);
  }
  if (gradientsAreChannelsLast(gradient)) {
    meetInBuffer(call, self, 2);
  }
  // The kernel for all layouts requires a weight.
  const bool is_general = !statisticsAreChannelsLast(self) || !statisticsAreChannelsLast(gradient);
  const BlockNumber one = is_general && !call.has(2) ? call.allocate(accumulatorBytes(self.scalar_type())) : -1;
  call.allocateResult(0);
  call.free({one, products, sums});
}

const KernelRules kBatchNormRules{
    {batchNorm, {"aten::native_batch_norm"}},
    {batchNormBackward, {"aten::native_batch_norm_backward"}},
};

}  // namespace

}  // namespace torchext
