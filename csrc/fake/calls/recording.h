#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Lives while the recorder of deferred_init runs an operator as a fake one on this thread. If the `Fake` handler
// refuses the operator as not implemented, the recorder catches the error and runs the operator for real. Nests.
class RecordingGuard {
 public:
  // `can_run_for_real` is false if an argument has no values; then the recorder catches nothing.
  explicit RecordingGuard(bool can_run_for_real) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(RecordingGuard);
  ~RecordingGuard();

 private:
  bool could_run_for_real_before_;
};

bool isRecording() noexcept;

// Returns true if an operator that is refused as not implemented will be run for real.
bool canRunForReal() noexcept;

// Returns true while PyTorch's `FakeTensorMode` calls a Meta kernel: the tensors that are made then are its own. It
// also does so for its tensors where the mode itself has not been entered. `in_kernel_invocation_manager()`
// (fake_tensor.py) includes the meta device in the thread's keys for that.
bool isInKernelOfFakeTensorMode() noexcept;

// NOTE [Calls of handlers]
//
// The handler of `Fake` passes calls that are about deferred tensors to the recorder, which calls it again to have them
// run as fakes: NOTE [Recording below autograd]. So are those that a `__torch_dispatch__` makes, be it of a mode or of
// a subclass, although these never reach the key `DeferredInit`: while it runs, `pythonFallback()` excludes all keys
// above `Python` on the thread (PythonFallbackKernel.cpp).

// How the recorder takes such calls.
struct HandlersRecorder {
  // Returns true if the call is about deferred tensors, and so is the recorder's.
  bool (*concerns)(const c10::OperatorHandle& op, const torch::jit::Stack& stack) = nullptr;
  // Handles such a call.
  void (*record)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) = nullptr;
};

// To be called once, before there are deferred tensors.
void setHandlersRecorder(HandlersRecorder recorder);

// Returns true if the call of `op` with the arguments on top of `stack` is the recorder's, which is not making it.
bool mustBeRecordedForHandler(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Lets the recorder handle such a call.
void recordForHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
