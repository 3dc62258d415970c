#include "fake_factories.h"

#include <cstddef>

#include "fake_keys.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// The guards and the blocks of this thread.
thread_local std::size_t guards = 0;
thread_local std::size_t blocks = 0;
thread_local bool was_included_before_blocks = false;

bool isIncluded() {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake);
}

}  // namespace

FakeFactoriesGuard::FakeFactoriesGuard() {
  ++guards;
}

FakeFactoriesGuard::~FakeFactoriesGuard() {
  --guards;
}

void enterFakeFactories() {
  if (blocks++ == 0) {
    was_included_before_blocks = isIncluded();
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, true);
  }
}

bool leaveFakeFactories() {
  if (blocks == 0) {
    return false;
  }
  if (--blocks == 0) {
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, was_included_before_blocks);
  }
  return true;
}

bool areFactoriesFake() {
  return isIncluded() && (!isFakeKeyShared() || guards + blocks > 0);
}

}  // namespace torchext
