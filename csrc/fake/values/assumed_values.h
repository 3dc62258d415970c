#pragma once

// NOTE [Assumed values]
//
// A program reads a few numbers of its tensors that change nothing of what it would cost: the loss that it prints, whether
// a gradient is infinite. So that a dry run need not end there, somebody may answer for them. Only a number or a truth
// value is asked for: where shapes depend on values, no answer would be right.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

// Returns the number that is to be taken for a value of `dtype` that `op` reads, or nothing.
using Assumption = std::optional<double> (*)(const c10::OperatorHandle& op, c10::ScalarType dtype);

// Lets `assumption` answer from now on, on all threads; nobody if it is null.
TORCHEXT_API void setAssumption(Assumption assumption) noexcept;

// If `op` reads one number or truth value, and somebody answers for it, replaces the arguments on top of `stack` by the
// answer and returns true.
bool assumeValue(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
