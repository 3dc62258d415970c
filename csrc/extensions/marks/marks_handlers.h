#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include "marks_key.h"

namespace torchext {

// A call that has reached the fallback of `kMarksKey`. It concerns the features that have marked an argument, and those
// that receive all calls on the thread. Origins handle it first.
class MarkedCall {
 public:
  MarkedCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);

  const c10::OperatorHandle& op() const noexcept {
    return op_;
  }
  c10::DispatchKeySet keys() const noexcept {
    return keys_;
  }
  torch::jit::Stack& stack() const noexcept {
    return stack_;
  }

  // Passes the call to the next feature or, after the last one, to the keys below. Calls made by kernels there do not
  // come here again.
  void passOn();

  // The same with other keys.
  void passOn(c10::DispatchKeySet keys);

 private:
  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  // Whether the call concerns a feature that has not yet handled it.
  bool concerns_origins_;
  bool concerns_amp_;
};

// The function by which a feature handles a call. It passes the call on once, or raises.
using MarksHandler = void (*)(MarkedCall& call);

// Sets the handler of AmpTensors: once per process, while the library is loaded.
void setHandlerOfAmp(MarksHandler handler) noexcept;

// The fallback of `kMarksKey`.
void marksFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
