#pragma once

#include <array>
#include <memory>
#include <optional>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/macros.h>

#include "../../../libraries/support/kernel_settings.h"

namespace torchext {

// The state that the result of an operator depends on, at the time when the operator was recorded: NOTE [Settings that
// kernels read]. The default dtype is process-wide, but a constructor may change it temporarily, so it is included.
struct ThreadState {
  c10::impl::LocalDispatchKeySet keys;
  c10::ScalarType default_dtype;
  std::array<c10::ScalarType, 2> autocast_dtypes;  // of kAutocastDevices in real_dispatch.cpp
  bool grad_mode;
  std::shared_ptr<const KernelSettings> settings;

  TORCHEXT_API static ThreadState current();

  // The same. Consecutive calls share one object while nothing changes.
  static std::shared_ptr<const ThreadState> shared();
};

// While it lives, no modes of `__torch_function__` are active on this thread, including the default device. In eager
// mode a kernel written in Python does not run under them either: each mode is popped while it handles the call.
class NoFunctionModes {
 public:
  NoFunctionModes();
  C10_DISABLE_COPY_AND_ASSIGN(NoFunctionModes);
  ~NoFunctionModes();

 private:
  std::optional<at::impl::PythonTorchFunctionTLS> previous_;
};

// While it lives, operators called on this thread run for real: without `DeferredInit`, `Fake`, autograd and Python
// modes, in the given state. Restores everything.
class TORCHEXT_API RealDispatch {
 public:
  // Keeps the present state, without gradients.
  RealDispatch() : RealDispatch(ThreadState::current(), nullptr) {}
  explicit RealDispatch(const ThreadState& state) : RealDispatch(ThreadState::current(), &state) {}
  C10_DISABLE_COPY_AND_ASSIGN(RealDispatch);
  ~RealDispatch();

 private:
  // Null `state` stands for `now` without gradients.
  RealDispatch(ThreadState now, const ThreadState* state);

  const ThreadState previous_;
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::AutoGradMode grad_mode_;
  NoFunctionModes no_modes_;
  KernelSettingsGuard settings_;
  // Autocast casts without its cache in the meantime. The cache keeps the cast of a leaf until the region ends, so
  // casts of leaves that exist only during the replay would be found later.
  const bool had_autocast_cache_;
};

}  // namespace torchext
