#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// Bumps the version of each of `written`, unless the key `ADInplaceOrView` is excluded: its kernels exclude it and bump
// versions themselves, and Python's factories exclude it. As with real tensors, raises an error for an inference tensor
// outside of inference mode.
void countVersions(at::TensorList written);

// The same for the result of a factory that fills it by an operator, if it is a strided fake.
void countFill(const at::Tensor& result);

// Counts the versions of NOTE [Versions that PyTorch does not count]: a `FollowCall`.
std::unique_ptr<CallFollower> followUncountedVersions(const c10::OperatorHandle& op,
                                                      const torch::jit::Stack& stack,
                                                      c10::function_ref<bool()> decomposes);

}  // namespace torchext
