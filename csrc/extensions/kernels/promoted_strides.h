#pragma once

// The order of dimensions in the results of elementwise operators on CUDA.
//
// A TensorIterator converts arguments whose dtype is not the common one. On the CPU and on the meta device it copies
// them first (`TensorIteratorBase::compute_types()`). The copy of an expanded tensor is contiguous, which can determine
// the order of the result's dimensions. CUDA kernels convert elements when loading them, so there the expanded tensor
// does not affect the order.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

// Returns the result of a TensorIterator over `tensors`, on the meta device and in `dtype`. Numbers may be on the CPU.
TORCHEXT_API at::Tensor resultOfIterator(c10::ArrayRef<at::Tensor> tensors, c10::ScalarType dtype);

// Gives the only result of an elementwise operator, computed by its Meta kernel, the strides that it has on CUDA. Does
// nothing unless `arguments` have several dtypes and one of them is expanded.
void giveStridesOfCuda(c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results);

}  // namespace torchext
