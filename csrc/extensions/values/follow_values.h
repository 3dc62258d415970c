#pragma once

// Values of the arguments and results of calls: NOTE [Known values], NOTE [Assumed values].

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

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

}  // namespace torchext
