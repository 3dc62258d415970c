#pragma once

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

#include "../../../libraries/support/included_key.h"

namespace torchext {

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
