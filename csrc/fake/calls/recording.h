#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Lives while the recorder of deferred_init runs an operator as a fake one on this thread. It catches what the `Fake`
// handler refuses as not implemented, and runs the operator for real then. Nests.
//
// That the thread excludes the key `DeferredInit` does not tell: so it does in the handler of a TorchDispatchMode.
class RecordingGuard {
 public:
  // `can_run_for_real` is false when an argument has no values, so that nothing is caught.
  explicit RecordingGuard(bool can_run_for_real) noexcept;
  RecordingGuard(const RecordingGuard&) = delete;
  RecordingGuard& operator=(const RecordingGuard&) = delete;
  RecordingGuard(RecordingGuard&&) = delete;
  RecordingGuard& operator=(RecordingGuard&&) = delete;
  ~RecordingGuard();

 private:
  bool could_run_for_real_before_;
};

bool isRecording() noexcept;

// True when an operator that is refused as not implemented will be run for real.
bool canRunForReal() noexcept;

// True while PyTorch's `FakeTensorMode` calls a Meta kernel, as it also does for its tensors when the mode itself is
// not entered: what is made then is its own. `in_kernel_invocation_manager()` (fake_tensor.py) includes the meta device
// in the thread's keys for that.
bool isInKernelOfFakeTensorMode() noexcept;

// NOTE [Calls of handlers]
//
// While a handler of `__torch_dispatch__` runs, be it of a mode or of a subclass, `pythonFallback()` excludes all keys
// above `Python` on the thread (PythonFallbackKernel.cpp), and `DeferredInit` is one of them. What the handler calls
// comes to the `Fake` handler without having been recorded. That one hands it up to the recorder first.

// What the recorder does with such a call.
struct HandlersRecorder {
  // True when it is about deferred tensors: then it is the recorder's.
  bool (*concerns)(const c10::OperatorHandle& op, const torch::jit::Stack& stack) = nullptr;
  // Handles it, if it is.
  void (*record)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) = nullptr;
};

// To be called once, before there are deferred tensors.
void setHandlersRecorder(HandlersRecorder recorder);

// True when the call of `op` with the arguments on top of `stack` has passed the recorder by, and is the recorder's.
bool mustBeRecordedForHandler(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Lets the recorder handle such a call.
void recordForHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
