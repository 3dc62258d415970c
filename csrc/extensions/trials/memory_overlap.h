#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Raises the kernels' error if the call on top of `stack` would write to one element several times, or, elementwise, to
// memory that it also reads as another element (`TensorIteratorBase::compute_mem_overlaps()`). Most Meta kernels do not
// check, and PyTorch's own functions for it compare data pointers.
void checkMemoryOverlap(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
