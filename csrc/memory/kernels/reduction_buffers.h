#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "kernel_call.h"

namespace torchext {

// A reduction as `gpu_reduce_kernel()` (Reduce.cuh) gets it.
struct Reduction {
  at::Tensor input;
  c10::ArrayRef<at::Tensor> results;
  c10::OptionalIntArrayRef dims;  // that are reduced; all if there are none
  bool keepdim = false;
  std::int64_t accumulator_bytes = 4;  // the size of what a thread accumulates
  int vector_size = 4;                 // how many elements a thread reads at once
};

// The size of what reductions of numbers accumulate in: `acc_type` of the dtype.
std::int64_t accumulatorBytes(c10::ScalarType dtype);

// All dimensions of `tensor` but one.
std::vector<std::int64_t> dimsBut(const at::Tensor& tensor, std::int64_t kept);

// What `gpu_reduce_kernel()` allocates and frees: where several blocks of threads reduce to the same result, a buffer
// in which they meet, and counters of those that have come.
void reduceOnGpu(KernelCall& call, const Reduction& reduction);

}  // namespace torchext
