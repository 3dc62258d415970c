#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/macros/Macros.h>
#include <torchext/macros.h>

#include "../../../libraries/support/included_key.h"

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

// Returns true if the `Fake` key also has another owner: NOTE [Two owners of the Fake key].
bool isFakeKeyShared() noexcept;

// Call when the key has been shared. This is permanent.
void setFakeKeyShared() noexcept;

// While an instance exists on a thread, factories there make fakes: the thread includes the `Fake` key on our behalf.
// Nests.
class TORCHEXT_API FakeFactoriesGuard {
 public:
  FakeFactoriesGuard();
  C10_DISABLE_COPY_AND_ASSIGN(FakeFactoriesGuard);
  ~FakeFactoriesGuard();

 private:
  IncludedKey include_{c10::DispatchKey::Fake};
};

// While an instance exists, factories on this thread make real tensors, even in fake_mode() and deferred_init().
class RealFactoriesGuard {
 public:
  RealFactoriesGuard() = default;
  C10_DISABLE_COPY_AND_ASSIGN(RealFactoriesGuard);
  ~RealFactoriesGuard() = default;

 private:
  IncludedKey fake_{c10::DispatchKey::Fake, /*is_included=*/false};
  IncludedKey deferred_{c10::DispatchKey::DeferredInit, /*is_included=*/false};
};

// Returns true if the thread includes the `Fake` key on our behalf: NOTE [Two owners of the Fake key]. PyTorch copies
// the included keys to other threads, such as those of the autograd engine. There the key counts as ours, unless it has
// another owner.
TORCHEXT_API bool areFactoriesFake();

}  // namespace torchext
