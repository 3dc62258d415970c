#pragma once

// Values of the arguments and results of calls: NOTE [Known values], NOTE [Assumed values].

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../libraries/support/stack_utils.h"
#include "assumed_reads.h"

namespace torchext {

// If `op` indexes with masks whose values are known or assumed, replaces these masks in `arguments` by the
// corresponding integers, as `expandTensors()` does (IndexingUtils.h), unless all values are known.
void expandMasks(const c10::OperatorHandle& op, torch::jit::Stack& arguments, Noting noting = Noting::kNotes);

// Call after a call has been refused because it reads values. If these are known or assumed, replaces the arguments on
// top of `stack` by the results and returns true.
bool answerForValues(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Call after a fake call of `op` has made `results`. If the values are known or can be assumed, also runs `op` on them.
// Otherwise removes the values of written arguments.
void followValues(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

// Returns the results of a call whose shapes depend only on the values of one argument: the mask of `masked_select`,
// the lengths of a packed sequence, or the positions of `bincount`. The other data need no values. Returns nothing for
// other calls, or if `value_of` does not have the values. Calls operators on fakes.
std::optional<torch::jit::Stack> resultsBySizes(const c10::OperatorHandle& op,
                                                c10::ArrayRef<c10::IValue> arguments,
                                                TensorMapper value_of);

}  // namespace torchext
