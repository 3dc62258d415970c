#pragma once

// What becomes of values in a call: NOTE [Constants keep their values], NOTE [Assumed values].

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "assumed_values.h"

namespace torchext {

// If `op` indexes with masks whose values are known, or assumed, replaces these masks in `arguments` by the integers
// that they stand for, as `expandTensors()` does (IndexingUtils.h), unless all values are known.
void expandMasks(const c10::OperatorHandle& op, torch::jit::Stack& arguments, Noting noting = Noting::kNotes);

// To be called for a call that has been refused because it reads values. If it reads known ones only, or others are
// assumed, replaces the arguments on top of `stack` by the results and returns true.
bool answerForValues(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// To be called after a fake call of `op` has made `results`: runs `op` on the values, too, if they are known or can be
// assumed, and otherwise forgets the values of what it has written.
void followValues(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
