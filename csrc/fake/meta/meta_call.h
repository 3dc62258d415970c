#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Replaces the arguments of a call of `op` on top of `stack`, at least one of which is fake unless it is a factory, by
// fake results, which it finds out by running the operator's Meta kernel. Metadata of arguments that the operator
// changes is changed.
//
// Raises DataDependentError and UnsupportedOperatorError when that cannot tell, c10::Error when the call would write
// into a real tensor, and what the kernel raises.
void runOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Raises c10::Error when the call of `op` with the arguments on top of `stack` would write into a real tensor.
void refuseToWriteIntoRealTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
