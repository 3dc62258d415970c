#pragma once

// NOTE [Collectives]
//
// A collective sends values to other processes, or writes the values that they send. Fakes have no values. Without this
// file the mistake would go unnoticed: c10d has Meta kernels that do nothing
// (torch/distributed/_meta_registrations.py), a backend would write real memory that another process reads, and the
// other processes would wait. So every operator that names a process group is decided here, before anything is sent or
// written:
//
//   * Deferred tensors among the arguments become real first, and the call is then made with them. A collective cannot
//     be recorded and made later, because other processes wait for it now.
//   * Fakes alone, on PyTorch's backend "fake", run through PyTorch's own kernels. These check arguments and count
//     versions as for real tensors, and send nothing. Values received from other processes are unknown: NOTE [Known
//     values].
//   * Fakes on any other backend, and fakes together with real tensors, are refused.
//   * A barrier has a tensor only to find its backend (`ProcessGroup::barrier()`). In fake_mode() that tensor is fake,
//     but the barrier must still happen. On the backend "fake", it runs on the fake tensor.
//   * Waiting for a tensor that no collective has made returns it immediately, as `c10d::wait_tensor()` does.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

// Handles communicating operators on fakes and deferred tensors: the hooks `CallHandler` and `Collectives`. Call while
// the library is loaded.
void registerCollectives();

// Registers kernels for the operators of c10d that take lists of lists of tensors. The dispatcher does not look for
// keys in such lists (`DispatchKeyExtractor`). Call before there are fakes. Repeated calls do nothing.
TORCHEXT_API void watchNestedLists();

// Observes every call of a c10d operator that names a process group, and of `_c10d_functional::wait_tensor`, on any
// thread, with real and with fake tensors. Functional collectives and `torch.distributed` end in these operators.
class TORCHEXT_API CollectiveObserver {
 public:
  CollectiveObserver() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CollectiveObserver);
  virtual ~CollectiveObserver() = default;

  // Calls `run`, which makes the call and returns its results, or raises an error without calling it.
  virtual void observe(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::function_ref<c10::ArrayRef<c10::IValue>()> run) = 0;
};

// Sets the observer, which must never be destroyed, or stops observing if it is null. Must not be called while another
// thread communicates.
TORCHEXT_API void observeCollectives(CollectiveObserver* observer);

}  // namespace torchext
