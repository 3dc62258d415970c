#include "fake_key.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "../../libraries/support/take_key.h"
#include "../hooks/hooks.h"
#include "fake_handler.h"
#include "storage/fake_keys.h"

namespace torchext {

using c10::DispatchKey;

namespace {

void registerFakeKey() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(DispatchKey::Fake)) {
    hooks().owners.share();
  } else {
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&fakeFallback>());
  }
  for (const OnKeyTaken prepare : hooks().on_fake_key) {
    prepare();
  }
}

void takeFakeKey() {
  static LazyKey key{DispatchKey::Fake, "Fake and deferred tensors need",
                     hooks().owners.share ? LazyKey::IfTaken::kShares : LazyKey::IfTaken::kRaises};
  key.take(registerFakeKey);
  if (isFakeKeyShared()) {
    hooks().owners.repair();
  }
}

[[maybe_unused]] const bool is_connected = [] {
  setTakeFakeKey(&takeFakeKey);
  return true;
}();

}  // namespace

void shareFakeKernels() {
  if (isFakeKeyShared()) {
    hooks().owners.shareKernels();
  }
}

}  // namespace torchext
