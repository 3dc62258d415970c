#include "registration.h"

#include <pthread.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "deferred_init/recorder.h"
#include "fake/composites.h"
#include "fake/fake_handler.h"
#include "fake/fake_storage.h"
#include "fake/metadata_cache.h"
#include "fake/recording.h"
#include "resize.h"
#include "tensor_marks.h"

namespace torchext {

using c10::DispatchKey;

namespace {

void checkFree(DispatchKey key) {
  TORCH_CHECK(!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key), "the dispatch key `",
              c10::toString(key),
              "` already has a fallback, registered by another library or by this version of PyTorch, and it can have "
              "only one. "
              "Import torchext in a process that does not load that library (torchdistx takes the same keys).");
}

void registerFallback(DispatchKey key, torch::CppFunction&& fallback) {
  // Leaked: kernels may be in flight until the process ends.
  static_cast<void>(
      (new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__))->fallback(std::move(fallback)));
}

// Threads do not survive a fork, but the locks that they held do, and workers of a DataLoader are forked.
void lockBeforeFork() {
  metadataCache().lock();
  lockStorages();
  lockMarks();
}

void unlockAfterFork() {
  unlockMarks();
  unlockStorages();
  metadataCache().unlock();
}

}  // namespace

void registerDispatchKeys() {
  static const bool registered = [] {
    checkFree(DispatchKey::Fake);
    checkFree(DispatchKey::DeferredInit);
    checkFree(kCompositesKey);
    checkFree(kMarksKey);
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&fakeFallback>());
    registerFallback(DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
    registerFallback(kMarksKey, torch::CppFunction::makeFromBoxedFunction<&marksFallback>());
    setHandlersRecorder(&recordForHandler);
    registerComposites();
    registerResize();
    pthread_atfork(&lockBeforeFork, &unlockAfterFork, &unlockAfterFork);
    return true;
  }();
  static_cast<void>(registered);
}

}  // namespace torchext
