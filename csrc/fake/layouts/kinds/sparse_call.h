#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns true for a call that takes a sparse tensor or makes one: NOTE [Sparse fakes].
bool isAboutSparse(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises what is known to be wrong with such a call before any kernel is run: DataDependentError if a strided tensor is
// converted, so that the number of elements of the result depends on values; UnsupportedOperatorError if there is no
// kernel; c10::NotImplementedError while deferred_init records; c10::Error if the call would write to a real tensor.
void checkSparse(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Replaces the arguments of a call that has been checked by fake results. Finds them by running the operator's kernel
// for sparse tensors, on the device that the fakes claim, on fake members. If this PyTorch has no such kernel, as for
// CUDA on a build without it, runs the kernel for the CPU or for Meta, or does without one: sparse_remedies.h.
//
// Raises DataDependentError or UnsupportedOperatorError if the kernel reads memory, and what the kernel raises.
void runOnSparse(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
