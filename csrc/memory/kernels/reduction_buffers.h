#pragma once

#include <cstdint>

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

// What `gpu_reduce_kernel()` allocates and frees: where several blocks of threads reduce to the same result, a buffer
// in which they meet, and counters of those that have come.
void reduceOnGpu(KernelCall& call, const Reduction& reduction);

}  // namespace torchext
