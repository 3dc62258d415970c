#pragma once

#include <torchext/macros.h>

#include "../../support/included_key.h"

namespace torchext {

// While at least one lives on a thread, factories make fakes there: the thread includes the `Fake` key, on our behalf.
// Nests.
class FakeFactoriesGuard {
 public:
  FakeFactoriesGuard();
  FakeFactoriesGuard(const FakeFactoriesGuard&) = delete;
  FakeFactoriesGuard& operator=(const FakeFactoriesGuard&) = delete;
  FakeFactoriesGuard(FakeFactoriesGuard&&) = delete;
  FakeFactoriesGuard& operator=(FakeFactoriesGuard&&) = delete;
  ~FakeFactoriesGuard();

 private:
  IncludedKey include_{c10::DispatchKey::Fake};
};

// Returns true if the thread includes the `Fake` key on our behalf: NOTE [Two owners of the Fake key]. PyTorch copies
// the included keys to other threads, such as those of the autograd engine. There the key counts as ours, unless it has
// another owner.
TORCHEXT_API bool areFactoriesFake();

}  // namespace torchext
