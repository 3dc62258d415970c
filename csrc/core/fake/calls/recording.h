#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Macros.h>
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

// Keys to exclude during internal calls: a Meta kernel, a read of values, a replay. The allocations, views and writes
// of such calls are not the user's: they must not reach autograd, a mode or our own handlers.
inline const c10::DispatchKeySet kHiddenFromUsers =
    c10::autograd_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                         c10::DispatchKey::TESTING_ONLY_GenericMode});

// While it lives, calls on real tensors are hidden.
struct HiddenCalls {
  const c10::impl::ExcludeDispatchKeyGuard keys{kHiddenFromUsers};
};

// Keys to exclude while a fake implementation runs (NOTE [Fake implementations]): all of these, except that our handler
// answers its calls, and that it may make tensors of subclasses.
inline const c10::DispatchKeySet kHiddenFromImplementations =
    kHiddenFromUsers - c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::Python});

}  // namespace torchext
