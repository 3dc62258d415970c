#pragma once

// NOTE [Collectives]
//
// A collective hands values to other processes, or writes what they hand over. Fakes have no values, and nobody would
// notice: c10d has Meta kernels that do nothing (torch/distributed/_meta_registrations.py), a backend writes real
// memory that somebody else reads, and the other processes wait. So this is decided here, before anything is sent or
// written, for all operators that name a process group:
//
//   * a deferred tensor among the arguments is refused, whatever the backend;
//   * fakes alone, on PyTorch's backend "fake", run through PyTorch's own kernels, which check what they check of real
//     tensors, count versions as they do there, and hand nothing to anybody. What another process would have written is
//     not known afterwards: NOTE [Constants keep their values];
//   * fakes on any other backend, and fakes together with real tensors, are refused;
//   * a barrier has a tensor only to find its backend (`ProcessGroup::barrier()`). In a block that tensor is fake, but
//     the barrier is to happen;
//   * waiting for a tensor that no collective has made does nothing and returns it, as `c10d::wait_tensor()` does.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

enum class Communication : std::uint8_t {
  kNone,
  kWaits,         // for the end of a collective
  kSynchronizes,  // processes, and communicates no values
  kCollective,
};

// What `op` does with other processes, by its schema.
Communication communicationOf(const c10::OperatorHandle& op);

// What becomes of a call with fakes of an operator that communicates.
enum class CollectiveOutcome : std::uint8_t {
  kRefused,
  kRunsKernel,  // PyTorch's, on the fakes
  kRunsReal,    // with a real tensor in the place of the fake one
  kRunsOnMeta,
};
CollectiveOutcome decideCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Raises the error of a call that is refused. Does nothing to others, and to calls without fakes.
void refuseCollective(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs PyTorch's kernel for the keys `below` on the fakes that are on top of `stack`.
void runCollective(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

// Lets the processes wait for each other, although the tensor on top of `stack` is fake.
void synchronizeForReal(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Lets those operators of c10d come here that take lists of lists of tensors. The dispatcher does not look for keys in
// them (`DispatchKeyExtractor`). To be called when there may be fakes; does nothing when called again.
void watchNestedLists();

}  // namespace torchext
