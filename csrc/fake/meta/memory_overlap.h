#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Raises what kernels raise when the call on top of `stack` would write one element several times, or, elementwise,
// into memory that it reads elsewhere (`TensorIteratorBase::compute_mem_overlaps()`). Meta kernels mostly do not look,
// and PyTorch's own functions for it compare data pointers.
void checkMemoryOverlap(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
