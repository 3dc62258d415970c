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

// Handles a call about deferred tensors, and returns true; leaves any other alone, and returns false.
using HandlersRecorder = bool (*)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void setHandlersRecorder(HandlersRecorder recorder);

// Lets the recorder handle a call that has passed it by. False when it has not, or when the recorder returns so.
bool tryRecordForHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
