#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace torchext {

// NOTE [Composites that look at memory]
//
// A composite operator runs above our key, as the operators that it is made of. A few do more than that: they read the
// memory of an argument, or allocate and write without asking what their arguments are. To meet these few, fakes carry
// a second key, which is above autograd and which PyTorch has for wrappers in tests. All operators fall through it but
// those that `registerOnCompositesKey()` has been told of, so that it costs nothing.
constexpr c10::DispatchKey kCompositesKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// The keys that a kernel on that key goes on with.
inline const c10::DispatchKeySet kBelowComposites{c10::DispatchKeySet::FULL_AFTER, kCompositesKey};

// The keys that make a tensor fake.
constexpr c10::DispatchKeySet kFakeKeys({c10::DispatchKey::Fake, kCompositesKey});

// Takes the key, for good. Cheap when that has been done. To be called before anything carries the key; raises when
// another library has taken it.
void takeCompositesKey();

// Registers kernels for operators of `aten` on the key.
using CompositesRegistrar = void (*)(torch::Library& library);

// Lets `registrar` register its kernels when the key is taken, which it must not have been.
void registerOnCompositesKey(CompositesRegistrar registrar);

}  // namespace torchext
