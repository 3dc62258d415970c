#pragma once

// Operators that must run immediately, with real values in place of deferred tensors.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

class OpNode;

// Calls the kernel that `op` has for `keys` below `Fake`, as eager execution would, and replaces the arguments on
// `stack` by its results. Data written into a deferred argument becomes that argument's recorded value. New tensors are
// returned as deferred constants. Real arguments are written.
void callForReal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);

// Calls the operator of `node` only for its effect on the generator, with copies of its deferred arguments. The first
// argument is not computed if the operator overwrites it.
void callInScratch(const OpNode& node);

// Returns a deferred tensor with the value of `constant`, which must not be written by other code.
at::Tensor deferConstant(const at::Tensor& constant);

// Calls `op`, which is composed of other operators, with the keys `below` ours, so that those are recorded.
//
// Its kernel may also read the memory of an argument. Mostly those are indices or lengths (`tensor_split`, `ctc_loss`).
// Then only these are computed, and the rest is recorded. Otherwise (`_sobol_engine_draw`) the whole call runs at once.
void callComposite(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

}  // namespace torchext
