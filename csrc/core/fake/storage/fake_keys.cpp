#include "fake_keys.h"

#include <atomic>
#include <cstddef>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

namespace {

std::atomic<bool> is_fake_key_shared{false};

// The number of live instances of FakeFactoriesGuard on this thread.
thread_local std::size_t guards = 0;

}  // namespace

bool isFakeKeyShared() noexcept {
  return is_fake_key_shared.load(std::memory_order_acquire);
}

void setFakeKeyShared() noexcept {
  is_fake_key_shared.store(true, std::memory_order_release);
}

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
