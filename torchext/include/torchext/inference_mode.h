#pragma once

/// @file
/// Inference mode, and how to keep what is made in it.

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// While it lives, inference mode is on, or off, on this thread. The same as `c10::InferenceMode`, which answers to the
/// same questions: `c10::InferenceMode::is_enabled()` tells of this one, too. Guards of either kind nest in any order,
/// and each puts back what it found, autograd's flags included.
class TORCHEXT_API InferenceMode {
 public:
  /// @param enabled False leaves inference mode for a while. As in PyTorch, gradients are recorded then, whatever was
  ///     set before.
  explicit InferenceMode(bool enabled = true);
  C10_DISABLE_COPY_AND_ASSIGN(InferenceMode);
  ~InferenceMode();

  /// Is the mode on, on this thread, whoever turned it on?
  static bool is_enabled();

 private:
  struct State;
  std::unique_ptr<State> previous_;
};

/// While it lives, what is allocated on this thread are normal tensors, and nothing records a gradient, whether or not
/// inference mode is on. It is for what outlives the mode, such as a cache. Inference tensors are as immutable in it as
/// they are outside.
class TORCHEXT_API NormalTensors {
 public:
  NormalTensors();
  C10_DISABLE_COPY_AND_ASSIGN(NormalTensors);
  ~NormalTensors();

 private:
  struct State;
  std::unique_ptr<State> previous_;
};

/// Makes normal tensors of the inference tensors among `tensors`, in place, whether they are real or fake; leaves
/// others alone. Those that share memory must be given together to go on sharing it: what others hold is copied.
///
/// @throws c10::Error One of them has a layout that is neither strided nor sparse. Nothing has changed then.
TORCHEXT_API void makeNormal(at::ArrayRef<at::Tensor> tensors);

/// Returns what of this thread's state is illegal, a sentence each; nothing when all is well. Guards of inference mode
/// do not lead to such a state, but turning grad mode on inside of them does, and so does changing the sets of dispatch
/// keys by hand. From then on version counters, views or gradients may be wrong without an error.
///
/// Legal states are those of training, of no-grad, of inference mode, and of a kernel below `Autograd` or below
/// `ADInplaceOrView`.
TORCHEXT_API std::vector<std::string> check_dispatch_state();

}  // namespace torchext
