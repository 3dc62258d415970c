#pragma once

// Values of the arguments and results of calls, and calls whose results depend on values: numbers, shapes and counts
// that the program reads. NOTE [Known values], NOTE [Assumed values].

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns the lengths of sequences that `op` uses for the fake `lengths`: their values if they have any, otherwise the
// share of `most` that counts in masks.
at::Tensor assumedLengths(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t most);

// The same for sequences of equal lengths with `total` elements together. The last one gets the remainder.
at::Tensor assumedShares(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t total);

// Returns whether the compared tensors are assumed to be equal, or close. Returns nothing if values are not assumed.
std::optional<bool> assumeEqual(const c10::OperatorHandle& op, const at::Tensor& a, const at::Tensor& b);

// If `op` indexes with masks whose values are known or assumed, replaces these masks in the arguments on top of `stack`
// by the corresponding integers, as `expandTensors()` does (IndexingUtils.h), unless all values are known.
void expandMasks(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool is_prediction);

// Call after a call has been refused because it reads values. If these are known or assumed, replaces the arguments on
// top of `stack` by the results and returns true.
bool answerForValues(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Call after a fake call of `op` has made `results`. If the values are known or can be assumed, also runs `op` on them.
// Otherwise removes the values of written arguments.
void followValues(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
