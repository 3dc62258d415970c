#include "registration.h"

#include <pthread.h>

#include <torch/library.h>

#include "deferred_init/deferred_resize.h"
#include "deferred_init/external_tensor.h"
#include "deferred_init/recorder.h"
#include "fake/cache/metadata_cache.h"
#include "fake/calls/recording.h"
#include "fake/fake_handler.h"
#include "fake/meta/refusals.h"
#include "fake/parts.h"
#include "fake/resize.h"
#include "fake/storage/fake_storage.h"
#include "marks/tensor_marks.h"
#include "take_key.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// Threads do not survive a fork, but the locks that they held do, and workers of a DataLoader are forked.
void lockBeforeFork() {
  lockKeys();
  metadataCache().lock();
  lockStorages();
  lockMarks();
  lockRefusals();
  lockSharedCopies();
}

void unlockAfterFork() {
  unlockSharedCopies();
  unlockRefusals();
  unlockMarks();
  unlockStorages();
  metadataCache().unlock();
  unlockKeys();
}

}  // namespace

void registerDispatchKeys() {
  static const bool registered = [] {
    connectPartsOfFakes();
    // torchdistx takes the same ones.
    checkKeyIsFree(DispatchKey::Fake, "torchext needs");
    checkKeyIsFree(DispatchKey::DeferredInit, "torchext needs");
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&fakeFallback>());
    registerFallback(DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
    setHandlersRecorder(handlersRecorder());
    registerResizeOfFakes();
    registerResizeOfDeferred();
    pthread_atfork(&lockBeforeFork, &unlockAfterFork, &unlockAfterFork);
    return true;
  }();
  static_cast<void>(registered);
}

}  // namespace torchext
