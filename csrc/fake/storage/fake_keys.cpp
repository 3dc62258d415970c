#include "fake_keys.h"

#include <atomic>
#include <vector>

#include "../../support/take_key.h"

namespace torchext {

namespace {

std::atomic<bool> is_fake_key_shared{false};
FakeKeyHooks key_hooks;

std::vector<CompositesRegistrar>& registrars() {
  static auto* registrars = new std::vector<CompositesRegistrar>;
  return *registrars;
}

void registerComposites() {
  registerFallback(kCompositesKey, key_hooks.make_composites_fallback());
  // Leaked: kernels may be in flight until the process ends.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kCompositesKey, __FILE__, __LINE__);
  for (const CompositesRegistrar registrar : registrars()) {
    registrar(*library);
  }
}

void takeCompositesKey() {
  static LazyKey key{kCompositesKey, "Fake and deferred tensors need"};
  key.take(registerComposites);
}

}  // namespace

void takeFakeKeys() {
  key_hooks.take_fake();
  takeCompositesKey();
}

void prepareForMathBits() {
  key_hooks.prepare_for_math_bits();
}

bool isFakeKeyShared() noexcept {
  return is_fake_key_shared.load(std::memory_order_acquire);
}

void setFakeKeyShared() noexcept {
  is_fake_key_shared.store(true, std::memory_order_release);
}

void setFakeKeyHooks(FakeKeyHooks hooks) noexcept {
  key_hooks = hooks;
}

void registerOnCompositesKey(CompositesRegistrar registrar) {
  registrars().push_back(registrar);
}

}  // namespace torchext
