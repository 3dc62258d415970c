#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Raises what the kernels of elementwise operators raise (`TensorIteratorBase::compute_mem_overlaps()`) when the call
// on top of `stack` would write one element twice, or into memory that it reads elsewhere. Their Meta kernels mostly do
// not look, and PyTorch's own functions for it compare data pointers. Calls of other operators pass.
void checkMemoryOverlap(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
