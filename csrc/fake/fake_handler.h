#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// The backend fallback of the `Fake` key: runs the operator for its metadata only. See csrc/README.md.
void fakeFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// True for the operator that `torch.tensor()` calls last, with the constant that it has made. While it fills in the
// values it excludes `Fake` and `DeferredInit` (tensor_new.cpp), so this is where the constant becomes visible to them.
bool isLiftFresh(const c10::OperatorHandle& op);

// True for an operator that makes new tensors from nothing but metadata: one without tensor arguments, or one like
// `zeros_like` and `new_empty` that looks at no value of its argument.
bool isFactory(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// True for an operator whose result, or the shape of whose result, cannot be told without the values of its arguments.
bool needsValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// A tensor whose storage has become real while it kept the `Fake` key: one that is not a FakeTensorImpl, because a real
// tensor was given fake `.data`. Takes the stale keys away.
void dropStaleKeys(const at::TensorBase& tensor);

}  // namespace torchext
