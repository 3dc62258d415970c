#pragma once

// NOTE [Correcting Meta kernels]
//
// Meta kernels make other dtypes, shapes and strides now and then than the kernels that they stand for: many are Python
// functions of their own. When a call is tried out, NOTE [Refusing what real tensors refuse], the real results are at
// hand, and right:
//
//   * their dtypes always: those of an empty convolution are promoted, for one;
//   * their shapes and strides when the trial had the sizes of the call: `pixel_unshuffle()` leaves what is empty as it
//     is, `zeros_like()` keeps the strides of dimensions of length 1;
//   * the order of their strides when the trial was smaller: `floor_divide()` keeps that of its argument.
//
// Only calls on the CPU are corrected so, because trials are made there.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// What a trial has made.
struct RealResults {
  torch::jit::Stack values;  // empty when nothing is known
  bool has_sizes = false;    // of the call
};

// True when nothing about `results`, those of a Meta kernel of `op`, would be corrected.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> results);

// Corrects the results of a Meta kernel of `op`, which are on top of `stack`, but those that are arguments or views.
void correctByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
