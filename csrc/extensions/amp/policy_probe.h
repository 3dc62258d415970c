#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "policies.h"

namespace torchext {

// NOTE [Probing autocast kernels]
//
// PyTorch has no readable list of its policies: each is compiled into the kernel of an operator. That kernel casts the
// arguments and calls the operator again, from the top of the dispatcher. So it is called with fake tensors of known
// dtypes, which cost nothing, and with the key of marked tensors enabled in the thread. The handler of that key then
// receives the operator with cast arguments, records their dtypes, and ends the call before the operator runs.

// How the kernel that `op` has on the key of autocast treats its arguments.
CastPolicy probeKernel(const c10::OperatorHandle& op, c10::DeviceType device_type);

// Returns true if this thread runs a probe. For the handler.
bool isProbingKernel() noexcept;

// Ends the call, by an exception, if `op` is the probed operator.
void inspectProbedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
