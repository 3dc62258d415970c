#pragma once

// How to find the results of a call on sparse fakes whose kernel reads the memory of their members: NOTE [Sparse
// fakes].

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "../../../support/operator_table.h"

namespace torchext {

// Returns true if the metadata of the result follow from those of the arguments, which are all fake.
bool hasRemedy(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if they do even though the kernel counts elements: the result is strided.
bool hasRemedyForElements(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Replaces the arguments on top of `stack` by the results. To be called for a call that has a remedy, while the thread
// includes `Fake`.
void applyRemedy(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Operators that read memory to find the number of elements of their result.
extern const OperatorSet countsElements;

}  // namespace torchext
