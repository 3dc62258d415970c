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

namespace torchext {

// Answers the hook `KeyOwners`. Call while the library is loaded.
void registerKeyOwners();

// Returns true if PyTorch's fallbacks of keys can be read and removed.
bool testFallbacks(bool is_broken);

}  // namespace torchext
