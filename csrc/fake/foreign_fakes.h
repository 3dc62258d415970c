#pragma once

// NOTE [Two owners of the Fake key]
//
// A dispatch key has one fallback. PyTorch is about to put its own on `Fake` (C++ FakeTensor, pytorch/pytorch#183776),
// and torchdistx has one there. No other key can carry our fakes: none lies between BackendSelect and the keys of
// autograd. So when the key is taken by the time we need it, we take the fallback of the other owner away and put one
// in its place that hands each call to whom it belongs:
//
//   * by its tensors: one of ours is on a fake storage (or was, and carries our second key still); any other that
//     carries `Fake` is theirs. A call with both kinds is an error that names both;
//   * where no tensor carries the key, by the block that the thread is in: fake_mode() or deferred_init() is ours, and
//     otherwise the block is theirs if the thread includes the key. In blocks of both the call is ours.
//
// A kernel that the other owner registers for a single operator goes before any fallback, so it is replaced in the same
// way (`shareKernelOf()`), when the thread enters a block of ours or when a tensor of ours meets the operator.
//
// `TensorImpl::is_fake()` (2.13) says only that a tensor carries the key, so it is true of ours, too, and so may be
// what asks it: `torch._C._is_fake_tensor()` and, where that exists, `is_fake()` of torch/_subclasses/fake_tensor.py.
// What PyTorch concludes is true of ours: that there is no memory to read or to launch a kernel on (the eager overrides
// of torch/_native, `tensor_to_list()`, which asks `select()` and `item()` for each element instead, nested_tensor.py,
// cudagraph_utils.py). Where it wants tensors of one mode it compares modes (`maybe_get_fake_mode()`), and ours have
// none.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns true if `tensor` carries the `Fake` key for another owner of it.
bool isForeignFake(const at::TensorBase& tensor);

// Raises the error for a call of `op` that has fakes of ours and of another owner among `arguments`.
[[noreturn]] void refuseToMixFakes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Puts ours in the place of the fallback that the `Fake` key has, for good. Raises when this version of PyTorch does
// not let us.
void shareFakeKey();

// Puts our fallback back when the other owner has given its own up, which takes ours away.
void repairSharedFakeKey();

// Puts ours in the place of the kernel that the other owner has for `op` on the `Fake` key, if there is one.
void shareKernelOf(const c10::OperatorHandle& op);

// The same for all operators.
void shareKernelsOfAll();

// Held while the process forks, so that the child does not find it locked by a thread that it does not have.
void lockForeignFakes();
void unlockForeignFakes();

// Handles a call that has arrived at the `Fake` key, or hands it to the other owner's fallback.
void callOwner(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
