#pragma once

// NOTE [Assumed values]
//
// A program reads a few numbers of its tensors that change nothing of what it would cost: the loss that it prints,
// whether a gradient is infinite. So that a dry run need not end there, somebody may answer for them. Only a number or
// a truth value is asked for: where shapes depend on values, no answer would be right.
//
// The answers have to fit together: if the program is told that an index is 0, the index plus 8 is 8. So an operator on
// tensors of one element, some of which are not known, is run on zeros in their places, and what it makes has an
// assumed value (NOTE [Constants keep their values]). It is not a known one: whoever reads it is answered, and counted.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

// Returns the number that is to be taken for a value of `dtype` that `op` reads, or nothing. `computed` is what follows
// from earlier answers, if something does.
using Assumption = std::optional<double> (*)(const c10::OperatorHandle& op,
                                             c10::ScalarType dtype,
                                             std::optional<double> computed);

// Lets `assumption` answer from now on, on all threads; nobody if it is null.
TORCHEXT_API void setAssumption(Assumption assumption) noexcept;

// Returns true if somebody answers.
bool assumesValues() noexcept;

// If `op` reads one number or truth value, and somebody answers for it, replaces the arguments on top of `stack` by the
// answer and returns true.
bool assumeValue(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
