// Permutations and samples: Randperm.cu, Distributions.cpp, MultinomialKernel.cu.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include <ATen/EmptyTensor.h>

#include "../../../core/support/sizes.h"
#include "cub_buffers.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

// `randperm_out_cuda()`: sorts numbers by random keys with enough bits that two are rarely equal.
void randperm(KernelCall& call) {
  const std::int64_t n = call.argument(0).toInt();
  const Tensor& result = call.result();
  const auto element = toSigned(result.element_size());
  call.allocateAndFree(element);  // `check_supported_max_int_with_precision()`
  if (n == 0) {
    return;
  }
  const BlockNumber range = call.allocate(n * element);
  const double log_threshold =
      std::log(0.9) * 12;  // NOLINT(readability-magic-numbers): see Note [Algorithm of randperm]
  const auto count = static_cast<double>(n);
  constexpr double kMaxBits = 64;
  const auto bits = static_cast<std::int64_t>(
      std::min(kMaxBits, std::ceil(std::log2(count - (((6 * count * count) + 1) / log_threshold)))));
  const std::int64_t key = bits <= 32 ? 4 : 8;  // NOLINT(readability-magic-numbers)
  const BlockNumber keys = call.allocate(n * key);
  const BlockNumber sorted = call.allocate(n * key);
  call.allocateAndFree(cubRadixSortBytes({n, key, element, bits}));
  call.free({sorted, keys, range});
}

// Reduces the probabilities to one number per distribution, or to one number.
void reduceProbabilities(KernelCall& call, c10::OptionalIntArrayRef dims, std::int64_t accumulator) {
  const Tensor& self = call.tensor(0);
  const Tensor result = dims.has_value()
                            ? at::detail::empty_meta(self.sizes().slice(0, self.sizes().size() - 1), self.scalar_type())
                            : at::detail::empty_meta({}, self.scalar_type());
  reduceOnGpu(call, {self, result, dims, /*keepdim=*/false, accumulator});
}

// `multinomial_out()` without replacement: checks the probabilities and divides them by random numbers. The largest
// quotients are the samples.
void sampleLargest(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const auto element = toSigned(self.element_size());
  const BlockNumber smallest = call.allocate(element);
  const BlockNumber largest = call.allocate(element);
  reduceProbabilities(call, std::nullopt, 2 * element);
  const BlockNumber is_finite = call.allocate(1);
  const BlockNumber is_positive = call.allocate(1);
  const BlockNumber is_valid = call.allocate(1);
  call.free({is_positive, is_finite});
  const std::int64_t distributions = self.dim() == 1 ? 1 : self.size(0);
  const BlockNumber sums = call.allocate(distributions * element);
  const std::array<std::int64_t, 1> last{self.dim() - 1};
  reduceProbabilities(call, c10::OptionalIntArrayRef{last}, accumulatorBytes(self.scalar_type()));
  const BlockNumber are_zero = call.allocate(distributions);
  BlockNumber is_any_zero = are_zero;
  if (self.dim() > 1) {
    is_any_zero = call.allocate(1);
    call.free({are_zero, sums});
  } else {
    call.free(sums);
  }
  call.allocateAndFree(1);
  const BlockNumber quotients = call.copy(self);
  const std::int64_t samples = call.argument(1).toInt();
  const BlockNumber values = samples == 1 ? -1 : call.allocate(distributions * samples * element);
  call.free({values, quotients, is_any_zero, is_valid, smallest, largest});
}

void multinomial(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  if (self.numel() == 0) {
    return;
  }
  if (!call.argument(2).toBool() || call.argument(1).toInt() == 1) {
    sampleLargest(call);
    return;
  }
  const BlockNumber normalized = call.copy(self);
  const BlockNumber sums = call.copy(self);
  if (self.numel() == self.size(-1)) {
    call.allocateAndFree(cubScanBytes(self.numel(), toSigned(self.element_size())));
  }
  call.free({sums, normalized});
}

// `normal_out_impl()`: draws, scales, and adds the means.
void normalAroundMeans(KernelCall& call) {
  call.allocateResults();
  call.allocateAndFree(KernelCall::bytesOf(call.result()));
}

// `bernoulli_tensor_cuda_kernel()` reads probabilities as float, or as double for a double result.
void bernoulliOfProbabilities(KernelCall& call) {
  const Tensor& probabilities = call.tensor(1);
  const c10::ScalarType dtype = call.tensor(0).scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (probabilities.scalar_type() != dtype) {
    call.allocateAndFree(probabilities.numel() * static_cast<std::int64_t>(c10::elementSize(dtype)));
  }
}

const KernelRules kRandomRules{
    {randperm, {"aten::randperm.out", "aten::randperm.generator_out"}},
    {multinomial, {"aten::multinomial"}},
    {normalAroundMeans, {"aten::normal.Tensor_float"}},
    {bernoulliOfProbabilities, {"aten::bernoulli_.Tensor"}},
};

}  // namespace

}  // namespace torchext
