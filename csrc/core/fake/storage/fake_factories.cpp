#include "fake_factories.h"

#include <cstddef>

#include <torchext/fake_tensor.h>

#include "../../../libraries/support/stack_utils.h"
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

FactoriesOfCall::FactoriesOfCall(c10::ArrayRef<c10::IValue> arguments) {
  bool has_fake = false;
  bool has_deferred = false;
  forEachTensor(arguments, [&](const at::Tensor& tensor) {
    if (isFake(tensor)) {
      has_fake = true;
      has_deferred = has_deferred || tensor.key_set().has(c10::DispatchKey::DeferredInit);
    }
  });
  if (has_deferred) {
    deferred_.emplace(c10::DispatchKey::DeferredInit);
  } else if (has_fake) {
    fake_.emplace();
  }
}

bool areFactoriesFake() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake) && (!isFakeKeyShared() || guards > 0);
}

}  // namespace torchext
