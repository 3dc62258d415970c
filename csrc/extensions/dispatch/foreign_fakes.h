#pragma once

// NOTE [Two owners of the Fake key]
//
// A dispatch key has one fallback. PyTorch plans to register one for `Fake` (C++ FakeTensor, pytorch/pytorch#183776),
// and torchdistx registers one. We cannot use another key: there is no unused one between BackendSelect and the keys of
// autograd. So if the key is already taken when we need it, we replace the other owner's fallback by one that passes
// each call to the owner of its tensors:
//
//   * A tensor is ours if it is on a fake storage, or was and still carries our second key. Any other tensor that
//     carries `Fake` is theirs. A call with both kinds raises an error that names both.
//   * If no tensor carries the key, the thread's block decides: fake_mode() and deferred_init() are ours. Otherwise, if
//     the thread includes the key, the block is theirs. In blocks of both the call is ours.
//
// A kernel that the other owner registers for a single operator takes precedence over any fallback, so it is replaced
// in the same way (`shareKernelOf()`): when a thread enters one of our blocks, or when the operator is called on one of
// our tensors.
//
// `TensorImpl::is_fake()` (2.13) only returns whether a tensor carries the key, so it is also true for our fakes. The
// same applies to its callers `torch._C._is_fake_tensor()` and, if it exists, `is_fake()` of
// torch/_subclasses/fake_tensor.py. PyTorch's conclusions hold for our fakes: there is no memory to read or to launch a
// kernel on (the eager overrides of torch/_native, `tensor_to_list()`, which calls `select()` and `item()` for each
// element instead, nested_tensor.py, cudagraph_utils.py). If PyTorch needs tensors of one mode, it compares modes
// (`maybe_get_fake_mode()`), and our fakes have none.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns true if `tensor` carries the `Fake` key for another owner of it.
bool isForeignFake(const at::TensorBase& tensor);

// Raises the error for a call of `op` with our fakes and another owner's among `arguments`.
[[noreturn]] void refuseToMixFakes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Replaces the fallback of the `Fake` key by ours, permanently. Raises if this version of PyTorch does not allow it.
void shareFakeKey();

// Registers our fallback again if it is missing: PyTorch removes it when the other owner unregisters its fallback.
void repairSharedFakeKey();

// If the other owner has registered a kernel for `op` on the `Fake` key, replaces it by ours.
void shareKernelOf(const c10::OperatorHandle& op);

// Replaces such kernels of all operators.
void shareKernelsOfAll();

// Handles a call that has arrived at the `Fake` key, or passes it to the other owner's fallback.
void callOwner(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Answers the hook `KeyOwners`. Call while the library is loaded.
void registerKeyOwners();

}  // namespace torchext
