#include "deferred_init.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../fake/calls/recording.h"
#include "../fake/fake_key.h"
#include "../fake/storage/fake_keys.h"
#include "../support/take_key.h"
#include "deferred_resize.h"
#include "op_graph.h"
#include "recorder.h"

namespace torchext {

namespace {

thread_local std::size_t depth = 0;

void registerDeferredInitKey() {
  registerFallback(c10::DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
  registerResizeOfDeferred();
  setHandlersRecorder(handlersRecorder());
}

void takeDeferredInitKey() {
  static LazyKey key{c10::DispatchKey::DeferredInit, "Deferred tensors need"};
  key.take(registerDeferredInitKey);
}

}  // namespace

void enterDeferredInit() {
  takeFakeKeys();
  takeDeferredInitKey();
  if (depth++ == 0) {
    shareFakeKernels();
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, true);
  }
}

void leaveDeferredInit() {
  TORCH_CHECK(depth > 0, "leave_deferred_init() was called without enter_deferred_init() on this thread.");
  if (--depth == 0) {
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, false);
  }
}

DeferredInitGuard::DeferredInitGuard() {
  enterDeferredInit();
}

DeferredInitGuard::~DeferredInitGuard() {
  leaveDeferredInit();
}

bool isDeferred(const at::TensorBase& tensor) {
  return valueOf(tensor) != nullptr;
}

}  // namespace torchext
