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
  takeFakeKey();
  takeCompositesKey();
}

void shareFakeKernels() {
  if (isFakeKeyShared()) {
    hooks().owners.shareKernels();
  }
}

}  // namespace torchext
