#pragma once

// Operators that cannot wait: called with real values in place of deferred tensors.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

class OpNode;

// Calls the kernel that `op` has for `keys` below `Fake`, as eager execution would, and replaces the arguments on
// `stack` by its results. What it writes into a deferred argument becomes that argument's recorded value; new tensors
// come back as deferred constants; what it writes into a real argument is written.
void callForReal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);

// Calls the operator of `node` for its effect on the generator alone, with copies of its deferred arguments. The first
// argument is not computed if the operator overwrites it anyway.
void callInScratch(const OpNode& node);

// Returns a deferred tensor whose value is that of `constant`, which must not be written by anything else.
at::Tensor deferConstant(const at::Tensor& constant);

}  // namespace torchext
