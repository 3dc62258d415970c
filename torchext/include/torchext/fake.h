#pragma once

/// @file
/// Making tensors fake: what would a program do on a device, without the device and without memory?

#include <memory>

#include <ATen/core/Tensor.h>
#include <torchext/fake_tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// While at least one lives on a thread, tensors that are constructed on that thread are fake. Guards nest. Each must
/// end on the thread that it began on, and the last one first, as objects in a scope do.
class TORCHEXT_API FakeModeGuard {
 public:
  /// @throws c10::Error The dispatch key `Fake` has an owner with which it cannot be shared, or this build does not fit
  ///     the PyTorch of the process.
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
