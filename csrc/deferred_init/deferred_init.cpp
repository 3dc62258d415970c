#include "deferred_init.h"

#include "../fake/calls/recording.h"
#include "../fake/fake_key.h"
#include "../fake/storage/fake_keys.h"
#include "../support/open_blocks.h"
#include "../support/take_key.h"
#include "deferred_resize.h"
#include "op_graph.h"
#include "recorder.h"

namespace torchext {

namespace {

void registerDeferredInitKey() {
  registerFallback(c10::DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
  registerResizeOfDeferred();
  setHandlersRecorder(handlersRecorder());
}

c10::DispatchKey takenDeferredInitKey() {
  static LazyKey key{c10::DispatchKey::DeferredInit, "Deferred tensors need"};
  takeFakeKeys();
  shareFakeKernels();
  key.take(registerDeferredInitKey);
  return c10::DispatchKey::DeferredInit;
}

}  // namespace

DeferredInitGuard::DeferredInitGuard() : include_{takenDeferredInitKey()} {}

DeferredInitGuard::~DeferredInitGuard() = default;

void enterDeferredInit() {
  OpenGuards<DeferredInitGuard>::enter(kAnybody);
}

void leaveDeferredInit() {
  OpenGuards<DeferredInitGuard>::leave(kAnybody, "deferred_init()");
}

bool isDeferred(const at::TensorBase& tensor) {
  return valueOf(tensor) != nullptr;
}

}  // namespace torchext
