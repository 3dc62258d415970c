#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "../../torch_internals/keys_of_tests.h"

namespace torchext {

// NOTE [Composites that look at memory]
//
// The kernel of a composite operator runs above our key, and we see only the operators that it calls. A few composites
// do more than call operators: they read the memory of an argument, or allocate and write without looking at what their
// arguments are. To intercept these few, fakes carry a second key, which is above autograd, and which PyTorch has for
// wrappers in tests. All operators fall through it, at no cost, except those that were registered through
// `registerOnCompositesKey()`.
constexpr c10::DispatchKey kCompositesKey = kKeyOfWrappersInTests;

// The keys with which a kernel on that key redispatches.
inline const c10::DispatchKeySet kBelowComposites{c10::DispatchKeySet::FULL_AFTER, kCompositesKey};

// The keys with which the handler of `Fake` lets a call go on.
inline const c10::DispatchKeySet kBelowFake{c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake};

// The keys that make a tensor fake.
constexpr c10::DispatchKeySet kFakeKeys({c10::DispatchKey::Fake, kCompositesKey});

// Takes the keys that fakes carry, for good: `Fake`, which is shared with another owner if it has one (NOTE [Two owners
// of the Fake key]), and the key of composites. Cheap once that has been done. To be called before any tensor carries
// one of them, or any thread includes one. Raises if one cannot be taken.
void takeFakeKeys();

// Returns true if the `Fake` key has another owner besides us. NOTE [Two owners of the Fake key]
bool isFakeKeyShared() noexcept;

// To be called when the key has been shared. There is no way back.
void setFakeKeyShared() noexcept;

// The functions for taking the keys that only the room of the handler can provide.
struct FakeKeyHooks {
  // Takes `Fake`, or shares it. Called by each `takeFakeKeys()`, and cheap once that has been done.
  void (*take_fake)() = nullptr;
  // Makes the fallback of the key of composites.
  torch::CppFunction (*make_composites_fallback)() = nullptr;
};

// To be called once, before there are fakes.
void setFakeKeyHooks(FakeKeyHooks hooks) noexcept;

// Registers kernels for operators of `aten` on the key of composites.
using CompositesRegistrar = void (*)(torch::Library& library);

// Has `registrar` register its kernels when the key of composites is taken. To be called before that.
void registerOnCompositesKey(CompositesRegistrar registrar);

}  // namespace torchext
