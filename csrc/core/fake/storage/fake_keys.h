#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace torchext {

// NOTE [Composites that read memory]
//
// The kernel of a composite operator runs above our key, so our handler receives only the operators that it calls. A
// few composites do more than call operators: they read the memory of an argument, or allocate and write without
// checking the type of their arguments. To intercept these few, fakes carry a second key, which is above autograd and
// which PyTorch reserves for wrappers in tests. All operators fall through it at no cost, except those that a hook
// registers (`on_composites_key`).
constexpr c10::DispatchKey kCompositesKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// The keys with which a kernel on that key redispatches.
inline const c10::DispatchKeySet kBelowComposites{c10::DispatchKeySet::FULL_AFTER, kCompositesKey};

// The keys with which the handler of `Fake` passes on a call.
inline const c10::DispatchKeySet kBelowFake{c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake};

// The keys that make a tensor fake.
constexpr c10::DispatchKeySet kFakeKeys({c10::DispatchKey::Fake, kCompositesKey});

// Takes the keys that fakes carry, permanently: `Fake`, which is shared with another owner if it has one (NOTE [Two
// owners of the Fake key]), and the key of composites. Cheap after the first call. Must be called before any tensor
// carries one of them, or any thread includes one. Raises if a key cannot be taken. Defined in fake.cpp, because it
// registers the handler of `Fake`.
void takeFakeKeys();

// Call before a fake gets these lazy bits.
void prepareForLazyBits(c10::DispatchKeySet bits);

// Returns true if the `Fake` key also has another owner: NOTE [Two owners of the Fake key].
bool isFakeKeyShared() noexcept;

// Call when the key has been shared. This is permanent.
void setFakeKeyShared() noexcept;

}  // namespace torchext
