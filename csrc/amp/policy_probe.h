#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "policies.h"

namespace torchext {

// NOTE [Asking autocast kernels]
//
// PyTorch keeps no list of its policies that could be read: each is compiled into the kernel of an operator. That
// kernel casts the arguments and calls the operator once more, from the top of the dispatcher. So it is called with
// tensors of known dtypes that cost nothing, fakes, and with the key of marked tensors in the thread; our handler of
// that key then meets the operator with cast arguments, notes their dtypes, and ends the call before anything is
// computed.

// How the kernel that `op` has on the key of autocast treats its arguments.
CastPolicy askKernel(const c10::OperatorHandle& op, c10::DeviceType device_type);

// For the handler: does this thread ask?
bool isAskingKernel() noexcept;

// Ends the call, by an exception, if `op` is what is asked about.
void lookAtAskedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
