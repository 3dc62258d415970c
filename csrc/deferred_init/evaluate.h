#pragma once

// The way from recorded values to real ones: for good, or for a look.

#include <mutex>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Makes `tensors` real, in place, in one pass over the graph: NOTE [Becoming real]. Every tensor that shows the same
// storages becomes real with them. Real tensors are left alone; a fake that was never recorded is an error. On an error
// all tensors are as they were.
void materialize(at::ArrayRef<at::Tensor> tensors);

// Returns a real tensor with the value that `deferred` will have, and leaves `deferred` as it is.
at::Tensor evaluate(const at::Tensor& deferred);

// Calls `op` with real values in the place of deferred ones, and replaces the arguments on `stack` by its results. What
// it writes into a deferred argument becomes that argument's recorded value; new tensors come back as deferred
// constants.
void callForReal(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Calls `op` for its effect on the generator alone, with copies of its deferred arguments.
void callInScratch(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns a deferred tensor whose value is that of `constant`, which nobody else may write into.
at::Tensor deferConstant(const at::Tensor& constant);

}  // namespace torchext
