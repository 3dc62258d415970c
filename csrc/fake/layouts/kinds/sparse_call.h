#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace torchext {

// True for a call that takes a sparse tensor or makes one: NOTE [Sparse fakes].
bool isAboutSparse(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises what is known to be wrong with such a call before any kernel is run: DataDependentError when the number of
// elements of the result depends on values, UnsupportedOperatorError when there is no kernel, c10::Error when the call
// would write into a real tensor.
void checkSparse(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Replaces the arguments of a call that has been checked by fake results, which it finds out by running the
// operator's kernel for sparse tensors on the device that the fakes claim, with the members of the arguments being
// fake. Where this PyTorch has no such kernel, as for CUDA on a build without it, that of the CPU or of Meta is run.
//
// Raises DataDependentError or UnsupportedOperatorError when the kernel reads memory, and what the kernel raises.
void runOnSparse(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
