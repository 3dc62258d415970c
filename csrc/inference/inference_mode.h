#pragma once

// Inference mode for C++: NOTE [What inference mode is made of].

#include <string>
#include <vector>

#include "../support/macros.h"
#include "thread_mode.h"

namespace torchext {

// While it lives, inference mode is on, or off, on this thread. The same as `c10::InferenceMode`, which answers to the
// same questions: `c10::InferenceMode::is_enabled()` tells of this one, too. Guards of either kind nest in any order,
// and each puts back what it found, autograd's flags included.
class TORCHEXT_API InferenceMode {
 public:
  explicit InferenceMode(bool enabled = true);
  InferenceMode(const InferenceMode&) = delete;
  InferenceMode& operator=(const InferenceMode&) = delete;
  InferenceMode(InferenceMode&&) = delete;
  InferenceMode& operator=(InferenceMode&&) = delete;
  ~InferenceMode();

  // Is the mode on, on this thread, whoever turned it on?
  static bool is_enabled();

 private:
  ThreadMode previous_;
};

// While it lives, what is allocated on this thread are normal tensors, and nothing records a gradient, whether or not
// inference mode is on. It is for what outlives the mode. Inference tensors are as immutable as they are outside.
class TORCHEXT_API NormalTensors {
 public:
  NormalTensors();
  NormalTensors(const NormalTensors&) = delete;
  NormalTensors& operator=(const NormalTensors&) = delete;
  NormalTensors(NormalTensors&&) = delete;
  NormalTensors& operator=(NormalTensors&&) = delete;
  ~NormalTensors();

 private:
  ThreadMode previous_;
};

// What of this thread's state is illegal, a sentence each; empty when all is well. The guards of inference mode do not
// lead to such a state, but turning grad mode on inside of them does, and so does changing the key sets by hand. From
// then on version counters, views or gradients may be wrong silently.
//
// Legal states are those of training, of no-grad, of inference mode, and of a kernel below `Autograd` or below
// `ADInplaceOrView`.
TORCHEXT_API std::vector<std::string> check_dispatch_state();

}  // namespace torchext
