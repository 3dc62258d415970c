#pragma once

/// @file
/// Inference mode, and normal tensors that outlive it.

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// Turns inference mode on or off on this thread while it lives. Equivalent to `c10::InferenceMode`:
/// `c10::InferenceMode::is_enabled()` also reports this guard. Guards of both kinds nest in any order, and each
/// restores the state before it, including autograd's flags.
class TORCHEXT_API InferenceMode {
 public:
  /// @param enabled False leaves inference mode temporarily. As in PyTorch, gradients are then recorded, regardless of
  ///     the setting before.
  explicit InferenceMode(bool enabled = true);
  C10_DISABLE_COPY_AND_ASSIGN(InferenceMode);
  ~InferenceMode();

  /// Returns true if inference mode is on, on this thread, by any guard.
  static bool is_enabled();

 private:
  struct State;
  std::unique_ptr<State> previous_;
};

/// While it lives, new tensors on this thread are normal tensors and gradients are not recorded, whether or not
/// inference mode is on. Use it for tensors that outlive the mode, such as caches. Inference tensors are as immutable
/// as outside.
class TORCHEXT_API NormalTensors {
 public:
  NormalTensors();
  C10_DISABLE_COPY_AND_ASSIGN(NormalTensors);
  ~NormalTensors();

 private:
  struct State;
  std::unique_ptr<State> previous_;
};

/// Converts the inference tensors among `tensors` to normal tensors, in place, whether they are real or fake. Other
/// tensors stay unchanged. Pass tensors that share memory together, so that they continue to share it: memory that
/// other tensors also use is copied.
///
/// @throws c10::Error One of them has a layout that is neither strided nor sparse. All tensors are unchanged then.
TORCHEXT_API void makeNormal(at::ArrayRef<at::Tensor> tensors);

/// Returns a sentence for each violation in the dispatch state of this thread; empty if the state is legal. Guards of
/// inference mode do not cause violations, but enabling grad mode inside them does, and so does changing the sets of
/// dispatch keys directly. In an illegal state, version counters, views or gradients may be wrong without an error.
///
/// Legal states are those of training, of no-grad, of inference mode, and of a kernel below `Autograd` or below
/// `ADInplaceOrView`.
TORCHEXT_API std::vector<std::string> check_dispatch_state();

}  // namespace torchext
