#pragma once

// NOTE [Correcting Meta kernels]
//
// The dtypes, shapes and strides of Meta kernels sometimes differ from those of the kernels that they stand for: many
// are separate Python functions. When a call is tried out (NOTE [Refusing what real tensors refuse]), its real results
// are available, and they are right:
//
//   * their dtypes always are: those of an empty convolution are promoted, for example;
//   * their shapes and strides are if the trial had the sizes of the call: `pixel_unshuffle()` returns an empty tensor
//     as it is, `zeros_like()` keeps the strides of dimensions of length 1;
//   * the order of their strides is if the trial was smaller: `floor_divide()` keeps that of its argument.
//
// Trials are made on the CPU. Of calls on CUDA they correct strides only, and what kernels of CUDA do in another way
// has the last word (device_hints.h).

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

namespace torchext {

// The results of a trial.
struct RealResults {
  // The returned values, and then those of `WrittenTensors::changed()`. Empty when nothing is known.
  torch::jit::Stack values;
  bool has_sizes = false;  // whether the trial had the sizes of the call
  std::vector<c10::Warning> warnings{};
};

// Returns true if `results`, which a Meta kernel of `op` has returned, and the values of `WrittenTensors::changed()`
// that follow them, need no correction.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> results);

// Corrects the results of a Meta kernel of `op`, which are on top of `stack`, except those that are arguments or views.
void correctByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);

// The same, but only strides, and only those of results that otherwise are what the Meta kernel says.
void correctStridesByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Returns the strides that `meta` should have if `real` is the result of a smaller call.
c10::DimVector stridesLike(const at::Tensor& real, const at::Tensor& meta);

}  // namespace torchext
