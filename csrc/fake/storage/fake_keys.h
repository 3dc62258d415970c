#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "../../torch_internals/keys_of_tests.h"

namespace torchext {

// NOTE [Composites that read memory]
//
// The kernel of a composite operator runs above our key, so our handler receives only the operators that it calls. A
// few composites do more than call operators: they read the memory of an argument, or allocate and write without
// checking the type of their arguments. To intercept these few, fakes carry a second key, which is above autograd and
// which PyTorch reserves for wrappers in tests. All operators fall through it at no cost, except those registered
// through `registerOnCompositesKey()`.
constexpr c10::DispatchKey kCompositesKey = kKeyOfWrappersInTests;

// The keys with which a kernel on that key redispatches.
inline const c10::DispatchKeySet kBelowComposites{c10::DispatchKeySet::FULL_AFTER, kCompositesKey};

// The keys with which the handler of `Fake` passes on a call.
inline const c10::DispatchKeySet kBelowFake{c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake};

// The keys that make a tensor fake.
constexpr c10::DispatchKeySet kFakeKeys({c10::DispatchKey::Fake, kCompositesKey});

// Takes the keys that fakes carry, permanently: `Fake`, which is shared with another owner if it has one (NOTE [Two
// owners of the Fake key]), and the key of composites. Cheap after the first call. Must be called before any tensor
// carries one of them, or any thread includes one. Raises if a key cannot be taken.
void takeFakeKeys();

// Call before a fake gets the negative or conjugate bit.
void prepareForMathBits();

// Returns true if the `Fake` key also has another owner: NOTE [Two owners of the Fake key].
bool isFakeKeyShared() noexcept;

// Call when the key has been shared. This is permanent.
void setFakeKeyShared() noexcept;

// Functions for taking the keys that only the component of the handler can provide.
struct FakeKeyHooks {
  // Takes `Fake`, or shares it. Each `takeFakeKeys()` calls it. Cheap after the first call.
  void (*take_fake)() = nullptr;
  // Makes the fallback of the key of composites.
  torch::CppFunction (*make_composites_fallback)() = nullptr;
  // Registers the kernels that fakes with the negative or conjugate bit need. Cheap after the first call.
  void (*prepare_for_math_bits)() = nullptr;
};

// Call once, before there are fakes.
void setFakeKeyHooks(FakeKeyHooks hooks) noexcept;

// Registers kernels for operators of `aten` on the key of composites.
using CompositesRegistrar = void (*)(torch::Library& library);

// Registers `registrar`, which will register its kernels when the key of composites is taken. Call before that.
void registerOnCompositesKey(CompositesRegistrar registrar);

}  // namespace torchext
