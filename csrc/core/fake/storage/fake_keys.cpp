#include "fake_keys.h"

#include <atomic>

#include "../../hooks/hooks.h"

namespace torchext {

namespace {

std::atomic<bool> is_fake_key_shared{false};

}  // namespace

void prepareForLazyBits(c10::DispatchKeySet bits) {
  for (const OnLazyBits prepare : hooks().on_lazy_bits) {
    prepare(bits);
  }
}

bool isFakeKeyShared() noexcept {
  return is_fake_key_shared.load(std::memory_order_acquire);
}

void setFakeKeyShared() noexcept {
  is_fake_key_shared.store(true, std::memory_order_release);
}

}  // namespace torchext
