#include "fake_key.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "../support/take_key.h"
#include "composites.h"
#include "fake_handler.h"
#include "foreign_fakes.h"
#include "gradient_factories.h"
#include "unboxed.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

void registerFakeKey() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(DispatchKey::Fake)) {
    shareFakeKey();
  } else {
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&fakeFallback>());
    registerUnboxedCalls();
  }
  makeGradientsFake(true);
}

void takeFakeKey() {
  static LazyKey key{DispatchKey::Fake, "Fake and deferred tensors need", LazyKey::IfTaken::kShares};
  key.take(registerFakeKey);
  if (isFakeKeyShared()) {
    repairSharedFakeKey();
  }
}

// The fallback of the key of composites if the `Fake` key has another owner, which may have registered a kernel for the
// operator.
void sharesKernel(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  shareKernelOf(op);
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

torch::CppFunction makeCompositesFallback() {
  return isFakeKeyShared() ? torch::CppFunction::makeFromBoxedFunction<&sharesKernel>()
                           : torch::CppFunction::makeFallthrough();
}

}  // namespace

FakeKeyHooks fakeKeyHooks() noexcept {
  return {&takeFakeKey, &makeCompositesFallback, &makeOutputsWithMathBitsResizable};
}

void shareFakeKernels() {
  if (isFakeKeyShared()) {
    shareKernelsOfAll();
  }
}

}  // namespace torchext
