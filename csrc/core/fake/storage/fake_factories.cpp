#include "fake_factories.h"

#include <cstddef>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "fake_keys.h"

namespace torchext {

namespace {

// The number of live guards on this thread.
thread_local std::size_t guards = 0;

}  // namespace

FakeFactoriesGuard::FakeFactoriesGuard() {
  ++guards;
}

FakeFactoriesGuard::~FakeFactoriesGuard() {
  --guards;
}

bool areFactoriesFake() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake) && (!isFakeKeyShared() || guards > 0);
}

}  // namespace torchext
