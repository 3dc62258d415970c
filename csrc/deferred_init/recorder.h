#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// The backend fallback of the `DeferredInit` key: records the operator and lets it go on as a fake one. See
// csrc/README.md.
void deferredInitFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// A `HandlersRecorder`: NOTE [Calls of handlers] in fake/recording.h.
bool recordForHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
