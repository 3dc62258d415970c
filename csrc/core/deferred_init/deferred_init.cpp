#include <memory>

#include <torchext/deferred_init.h>

#include "../../libraries/support/included_key.h"
#include "../../libraries/support/take_key.h"
#include "../fake/fake_key.h"
#include "../fake/storage/fake_keys.h"
#include "../hooks/hooks.h"
#include "graph/op_graph.h"
#include "record/recorder.h"

namespace torchext {

namespace {

void registerDeferredInitKey() {
  registerFallback(c10::DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
  for (const OnKeyTaken prepare : hooks().on_deferred_init_key) {
    prepare();
  }
  setHandlersRecorder();
}

void takeDeferredInitKey() {
  static LazyKey key{c10::DispatchKey::DeferredInit, "Deferred tensors need"};
  takeFakeKeys();
  shareFakeKernels();
  key.take(registerDeferredInitKey);
}

}  // namespace

struct DeferredInitGuard::State {
  IncludedKey include{c10::DispatchKey::DeferredInit};
};

DeferredInitGuard::DeferredInitGuard() {
  takeDeferredInitKey();
  state_ = std::make_unique<State>();
}

DeferredInitGuard::~DeferredInitGuard() = default;

bool isDeferred(const at::TensorBase& tensor) {
  return valueOf(tensor) != nullptr;
}

}  // namespace torchext
