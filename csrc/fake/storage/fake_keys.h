#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "../../torch_internals/keys_of_tests.h"

namespace torchext {

// NOTE [Composites that look at memory]
//
// A composite operator runs above our key, as the operators that it is made of. A few do more than that: they read the
// memory of an argument, or allocate and write without asking what their arguments are. To meet these few, fakes carry
// a second key, which is above autograd and which PyTorch has for wrappers in tests. All operators fall through it but
// those that `registerOnCompositesKey()` has been told of, so that it costs nothing.
constexpr c10::DispatchKey kCompositesKey = kKeyOfWrappersInTests;

// The keys that a kernel on that key goes on with.
inline const c10::DispatchKeySet kBelowComposites{c10::DispatchKeySet::FULL_AFTER, kCompositesKey};

// The keys that make a tensor fake.
constexpr c10::DispatchKeySet kFakeKeys({c10::DispatchKey::Fake, kCompositesKey});

// Takes the keys that fakes carry, for good: `Fake`, which is shared with another owner if it has one (NOTE [Two owners
// of the Fake key]), and the one of composites. Cheap when that has been done. To be called before anything carries or
// includes one of them; raises when one cannot be had.
void takeFakeKeys();

// Returns true if the `Fake` key has another owner beside us. NOTE [Two owners of the Fake key]
bool isFakeKeyShared() noexcept;

// To be called by who shares it. There is no way back.
void setFakeKeyShared() noexcept;

// What only the room of the handler knows about the keys.
struct FakeKeyHooks {
  // Takes `Fake`, or shares it. Called by each `takeFakeKeys()`, and cheap when it has been done.
  void (*take_fake)() = nullptr;
  // The fallback of the other key.
  torch::CppFunction (*make_composites_fallback)() = nullptr;
};

// To be called once, before there are fakes.
void setFakeKeyHooks(FakeKeyHooks hooks) noexcept;

// Registers kernels for operators of `aten` on the key of composites.
using CompositesRegistrar = void (*)(torch::Library& library);

// Lets `registrar` register its kernels when the key of composites is taken, which it must not have been.
void registerOnCompositesKey(CompositesRegistrar registrar);

}  // namespace torchext
