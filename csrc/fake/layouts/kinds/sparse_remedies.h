#pragma once

// What can be told of a call on sparse fakes although its kernel reads the memory of their members. NOTE [Sparse fakes]

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace torchext {

// True when the metadata of the result follow from those of the arguments, all of which are fake.
bool hasRemedy(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// True when they do even if the kernel asks how many elements there are: the result is strided.
bool hasRemedyForElements(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Replaces the arguments on top of `stack` by the results. To be called with `Fake` included in the thread, for a call
// that has a remedy.
void applyRemedy(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// True for an operator that reads memory to find out how many elements its result has.
bool countsElements(const c10::OperatorHandle& op);

}  // namespace torchext
