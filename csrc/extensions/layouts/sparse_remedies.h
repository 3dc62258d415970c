#pragma once

// Results of calls on sparse fakes whose kernel reads the memory of their members: NOTE [Sparse fakes].

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "../../libraries/support/operator_table.h"

namespace torchext {

// Returns true if the metadata of the result follow from those of the arguments, which must all be fake.
bool hasRemedy(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if that holds although the kernel counts elements, because the result is strided.
bool hasRemedyForElements(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Replaces the arguments on top of `stack` by the results. The call must have a remedy, and the thread must include
// `Fake`.
void applyRemedy(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Operators that read memory to count the elements of their result.
extern const OperatorSet countsElements;

}  // namespace torchext
