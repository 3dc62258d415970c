#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

// Exists while the recorder of deferred_init runs an operator as a fake one on this thread. If the `Fake` handler
// refuses the operator as not implemented, the recorder catches the error and runs the operator for real. Nests.
class TORCHEXT_API RecordingGuard {
 public:
  // `can_run_for_real`: false if an argument has no values. Then the recorder catches nothing.
  explicit RecordingGuard(bool can_run_for_real) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(RecordingGuard);
  ~RecordingGuard();

 private:
  bool could_run_for_real_before_;
};

bool isRecording() noexcept;

// Returns true if an operator that is refused as not implemented will be run for real.
bool canRunForReal() noexcept;

// Exists while a fake implementation runs on this thread: NOTE [Fake implementations]. Its calls are not those of the
// program: they are not recorded, their memory is not counted, they draw no random numbers, and do not communicate.
// Nests.
class ImplementationGuard {
 public:
  ImplementationGuard() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(ImplementationGuard);
  ~ImplementationGuard();

 private:
  int recordings_;
  bool could_run_for_real_before_;
};

bool isInFakeImplementation() noexcept;

// Exists while a PyTorch kernel for sparse tensors runs on fakes on this thread. Errors of the operators that the
// kernel calls must keep their C++ types until its caller has caught them. Nests.
class SparseKernelGuard {
 public:
  SparseKernelGuard() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(SparseKernelGuard);
  ~SparseKernelGuard();
};

bool isInSparseKernel() noexcept;

// Returns true while PyTorch's `FakeTensorMode` calls a Meta kernel: tensors made in the kernel belong to that mode.
// For its own tensors, this also applies where the mode has not been entered. `in_kernel_invocation_manager()`
// (fake_tensor.py) includes the meta device in the thread's keys, which this function checks.
bool isInKernelOfFakeTensorMode() noexcept;

// NOTE [Calls of handlers]
//
// The handler of `Fake` passes calls that concern deferred tensors to the recorder, which calls the handler again to
// run them as fakes: NOTE [Recording below autograd]. This includes calls from the `__torch_dispatch__` of a mode or a
// subclass, which do not reach the key `DeferredInit`: `pythonFallback()` excludes all keys above `Python` on the
// thread while `__torch_dispatch__` runs (PythonFallbackKernel.cpp).

// The recorder's functions for such calls.
struct HandlersRecorder {
  // Returns true if the call concerns deferred tensors.
  bool (*concerns)(const c10::OperatorHandle& op, const torch::jit::Stack& stack) = nullptr;
  // Handles such a call.
  void (*record)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) = nullptr;
};

// Call once, before there are deferred tensors.
void setHandlersRecorder(HandlersRecorder recorder);

// Returns true if the recorder must handle the call of `op` with the arguments on top of `stack`, and has not yet done
// so.
bool mustBeRecordedForHandler(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true if there may be such calls: recorded tensors exist, or have existed.
bool haveHandlersRecorder() noexcept;

// Passes such a call to the recorder.
void recordForHandler(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
