#include "fake_keys.h"

#include <atomic>

#include "../../../libraries/support/take_key.h"
#include "../../hooks/hooks.h"

namespace torchext {

namespace {

std::atomic<bool> is_fake_key_shared{false};
void (*take_fake_key)() = nullptr;

// The fallback of the key of composites if the `Fake` key has another owner, which may have registered a kernel for the
// operator.
void sharesKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  hooks().owners.shareKernelOf(op);
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

void registerComposites() {
  registerFallback(kCompositesKey, isFakeKeyShared() ? torch::CppFunction::makeFromBoxedFunction<&sharesKernel>()
                                                     : torch::CppFunction::makeFallthrough());
  // Leaked: kernels may be in flight until the process ends.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kCompositesKey, __FILE__, __LINE__);
  for (const RegisterKernels register_kernels : hooks().on_composites_key) {
    register_kernels(*library);
  }
}

void takeCompositesKey() {
  static LazyKey key{kCompositesKey, "Fake and deferred tensors need"};
  key.take(registerComposites);
}

}  // namespace

void takeFakeKeys() {
  take_fake_key();
  takeCompositesKey();
}

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

void setTakeFakeKey(void (*take)()) noexcept {
  take_fake_key = take;
}

}  // namespace torchext
