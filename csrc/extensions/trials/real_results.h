#pragma once

// NOTE [Correcting Meta kernels]
//
// The dtypes, shapes and strides of Meta kernels sometimes differ from those of the real kernels: many are separate
// Python functions. A trial of a call (NOTE [Errors of real tensors]) provides real results, which take
// precedence:
//
//   * dtypes always: for example, those of an empty convolution are promoted;
//   * shapes and strides if the trial had the sizes of the call: `pixel_unshuffle()` returns an empty tensor unchanged,
//     `zeros_like()` keeps the strides of dimensions of length 1;
//   * the order of strides if the trial was smaller: `floor_divide()` keeps that of its argument.
//
// Trials run on the CPU. For calls on CUDA they correct only strides, and the rules for elementwise CUDA kernels and
// convolutions are applied last (device_kernels.cpp).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// Returns true if no correction is needed for `results`: those of a Meta kernel of `op`, followed by the values of
// the written arguments: `RealResults`.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> results);

// Corrects the results of a Meta kernel of `op`, which are on top of `stack`, except those that are arguments or views.
void correctByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Like `correctByReal()`, but corrects only strides, and only those of results that otherwise agree with the Meta
// kernel's.
void correctStridesByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Returns the strides that `meta` should have if `real` is the result of a smaller call.
c10::DimVector stridesLike(const at::Tensor& real, const at::Tensor& meta);

}  // namespace torchext
