#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns true for a call that takes a sparse tensor or makes one: NOTE [Sparse fakes].
bool isAboutSparse(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises errors that can be predicted without running a kernel: DataDependentError if a strided tensor is converted,
// because the number of elements of the result depends on values; UnsupportedOperatorError if there is no kernel;
// c10::NotImplementedError while deferred_init records; c10::Error if the call would write to a real tensor.
void checkSparse(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Replaces the arguments of a checked call by fake results. Runs the operator's sparse kernel for the claimed device on
// fake members. If PyTorch has no such kernel, such as for CUDA in a build without CUDA, runs the kernel for the CPU or
// for Meta, or uses a remedy.
//
// Raises DataDependentError or UnsupportedOperatorError if the kernel reads memory, and passes on the kernel's errors.
void runOnSparse(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
