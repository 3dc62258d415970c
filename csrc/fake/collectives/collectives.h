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

enum class Communication : std::uint8_t {
  kNone,
  kWaits,         // waits for the end of a collective
  kSynchronizes,  // synchronizes processes without communicating values
  kCollective,
};

// Returns how `op` communicates with other processes, according to its schema.
Communication communicationOf(const c10::OperatorHandle& op);

// The ways to handle a call of a communicating operator on fakes.
enum class CollectiveOutcome : std::uint8_t {
  kRefused,
  kRunsKernel,  // runs PyTorch's kernel on the fakes
  kRunsReal,    // makes the call with a real tensor in place of the fake one
  kRunsOnMeta,
};
CollectiveOutcome decideCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// The recorder of deferred tensors registers the function that makes them real in place.
using MakeReal = void (*)(c10::ArrayRef<at::Tensor> deferred);
void setMakeReal(MakeReal make_real) noexcept;

// Makes the deferred tensors among the arguments real. Returns false if no argument is deferred. If there are other
// fakes, raises an error before changing anything.
bool makeDeferredReal(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises an error if the call must be refused. Does nothing for other calls, including those without fakes.
void refuseCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs PyTorch's kernel for the keys `below` on the fakes that are on top of `stack`.
void runCollective(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

// Makes the processes wait for each other, although the tensor on top of `stack` is fake.
void synchronizeForReal(const c10::OperatorHandle& op, torch::jit::Stack& stack);

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
