#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Answers the hooks of `Layouts`, and handles calls on sparse fakes. Call after the registration of the other handlers
// of calls, while the library is loaded.
void registerLayouts();

// Implement the hooks `Layouts::fakeLike` and `Layouts::refuse`.
at::Tensor fakeLikeSparse(const at::Tensor& tensor);
void refuseLayouts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
