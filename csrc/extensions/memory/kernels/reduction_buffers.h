#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "kernel_call.h"

namespace torchext {

// A reduction, as the arguments of `gpu_reduce_kernel()` (Reduce.cuh).
struct Reduction {
  at::Tensor input;
  c10::ArrayRef<at::Tensor> results;
  c10::OptionalIntArrayRef dims;  // the reduced dimensions; empty for all
  bool keepdim = false;
  std::int64_t accumulator_bytes = 4;  // the size of the accumulator of a thread
  int vector_size = 4;                 // the number of elements a thread reads at once
};

// Returns the size of the accumulator of reductions of numbers: `acc_type` of the dtype.
std::int64_t accumulatorBytes(c10::ScalarType dtype);

// Returns all dimensions of `tensor` except one.
std::vector<std::int64_t> dimsBut(const at::Tensor& tensor, std::int64_t kept);

// Adds the allocations and frees of `gpu_reduce_kernel()`. If several thread blocks reduce to the same result, it
// allocates a buffer for their partial results, and counters of the blocks that are done.
void reduceOnGpu(KernelCall& call, const Reduction& reduction);

}  // namespace torchext
