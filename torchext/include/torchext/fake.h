#pragma once

/// @file
/// Fake mode: run a program on any device without the device and without memory.

#include <memory>

#include <ATen/core/Tensor.h>
#include <torchext/fake_tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// While at least one guard lives on a thread, tensors constructed on that thread are fake. Guards nest. Each must end
/// on the thread that it began on, in reverse order, like objects in a scope.
class TORCHEXT_API FakeModeGuard {
 public:
  /// @throws c10::Error The dispatch key `Fake` has an owner that cannot share it, or this build does not match the
  ///     PyTorch of the process.
  FakeModeGuard();
  C10_DISABLE_COPY_AND_ASSIGN(FakeModeGuard);
  ~FakeModeGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns a meta tensor with the shape, strides and dtype of `fake`, detached from autograd.
///
/// @throws c10::ValueError `fake` is real.
/// @throws c10::NotImplementedError `fake` is not strided.
TORCHEXT_API at::Tensor metaLike(const at::Tensor& fake);

}  // namespace torchext
