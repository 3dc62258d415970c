#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Handles a call in a self-cleaning region, or with AmpTensors among its arguments: decides whether the call autocasts,
// and what its results are. csrc/README.md tells the steps.
void ampFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
