#pragma once

// NOTE [Collectives]
//
// A collective sends values to other processes, or writes what they send. Fakes have no values, and without this file
// the mistake would go unnoticed: c10d has Meta kernels that do nothing (torch/distributed/_meta_registrations.py), a
// backend would write real memory that another process reads, and the other processes would wait. So every operator
// that names a process group is decided here, before anything is sent or written:
//
//   * deferred tensors among the arguments become real first, and the call is then made with them. A collective has
//     effects on other processes, which wait for it now, so that it cannot be recorded and made later;
//   * fakes alone, on PyTorch's backend "fake", run through PyTorch's own kernels, which check arguments and count
//     versions as for real tensors, and send nothing. What another process would have written is not a known value
//     afterwards: NOTE [Constants keep their values];
//   * fakes on any other backend, and fakes together with real tensors, are refused;
//   * a barrier has a tensor only to find its backend (`ProcessGroup::barrier()`). In a block that tensor is fake, but
//     the barrier must still happen; on the backend "fake" it does with the fake;
//   * waiting for a tensor that no collective has made does nothing and returns it, as `c10d::wait_tensor()` does.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

enum class Communication : std::uint8_t {
  kNone,
  kWaits,         // waits for the end of a collective
  kSynchronizes,  // synchronizes processes, and communicates no values
  kCollective,
};

// Returns how `op` communicates with other processes, by its schema.
Communication communicationOf(const c10::OperatorHandle& op);

// What to do with a call of a communicating operator on fakes.
enum class CollectiveOutcome : std::uint8_t {
  kRefused,
  kRunsKernel,  // runs PyTorch's kernel on the fakes
  kRunsReal,    // makes the call with a real tensor in place of the fake one
  kRunsOnMeta,
};
CollectiveOutcome decideCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Who records deferred tensors makes them real, in place.
using MakeReal = void (*)(c10::ArrayRef<at::Tensor> deferred);
void setMakeReal(MakeReal make_real) noexcept;

// Makes the deferred tensors among the arguments real. Returns false if there are none. Raises an error, and has done
// nothing, if there are other fakes with them.
bool makeDeferredReal(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises an error if the call is to be refused. Does nothing to other calls, nor to calls without fakes.
void refuseCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs PyTorch's kernel for the keys `below` on the fakes that are on top of `stack`.
void runCollective(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

// Makes the processes wait for each other, although the tensor on top of `stack` is fake.
void synchronizeForReal(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Makes the operators of c10d that take lists of lists of tensors come here: the dispatcher does not look for keys in
// such lists (`DispatchKeyExtractor`). To be called once there may be fakes; does nothing when called again.
TORCHEXT_API void watchNestedLists();

// Is told of every call of an operator of c10d that names a process group, and of `_c10d_functional::wait_tensor`, on
// any thread, with real tensors and with fakes: functional collectives and `torch.distributed` end in these operators.
class TORCHEXT_API CollectiveObserver {
 public:
  CollectiveObserver() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CollectiveObserver);
  virtual ~CollectiveObserver() = default;

  // Makes the call, by `run`, which returns its results; or raises an error instead, and nothing has been done.
  virtual void observe(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::function_ref<c10::ArrayRef<c10::IValue>()> run) = 0;
};

// Lets `observer`, which is never destroyed, observe from now on; nobody if it is null. Not to be called while another
// thread communicates.
TORCHEXT_API void observeCollectives(CollectiveObserver* observer);

}  // namespace torchext
