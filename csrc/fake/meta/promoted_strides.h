#pragma once

// The order of dimensions in the results of elementwise operators on CUDA.
//
// A TensorIterator converts arguments of other dtypes than the common one. On the CPU and on the meta device it makes
// copies first (`TensorIteratorBase::compute_types()`), and a copy of an expanded tensor is contiguous, which can
// decide the order of the dimensions of the result. Kernels of CUDA convert what they load, so that there the expanded
// tensor has no say.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns what a TensorIterator makes of `tensors`, on the meta device and in `dtype`. They may be numbers on the CPU.
at::Tensor resultOfIterator(c10::ArrayRef<at::Tensor> tensors, c10::ScalarType dtype);

// Gives the only result of an elementwise operator, which its Meta kernel has made of `arguments`, the strides that it
// has on CUDA. Only looks at the arguments unless they are of several dtypes and one of them is expanded.
void giveStridesOfCuda(c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results);

}  // namespace torchext
