#include "registration.h"

#include <cstdlib>
#include <string_view>

#include <pthread.h>
#include <torch/version.h>

#include "deferred_init/external_tensor.h"
#include "fake/cache/metadata_cache.h"
#include "fake/foreign_fakes.h"
#include "fake/meta/refusals.h"
#include "fake/parts.h"
#include "fake/storage/fake_storage.h"
#include "marks/tensor_marks.h"
#include "memory/device_memory.h"
#include "memory/memory_counter.h"
#include "support/take_key.h"
#include "torch_internals/self_tests.h"

namespace torchext {

namespace {

// Threads do not survive a fork, but the locks that they held do, and the workers of a DataLoader are forked.
void lockBeforeFork() {
  lockKeys();
  lockForeignFakes();
  metadataCache().lock();
  lockStorages();
  lockDeviceMemory();
  lockMarks();
  lockRefusals();
  lockSharedCopies();
}

void unlockAfterFork() {
  unlockSharedCopies();
  unlockRefusals();
  unlockMarks();
  unlockDeviceMemory();
  unlockStorages();
  metadataCache().unlock();
  unlockForeignFakes();
  unlockKeys();
}

// What a program without Python needs, which imports nothing: the self-tests run before the first key is taken.
[[maybe_unused]] const bool is_loaded = [] {
  connectPartsOfFakes();
  registerMemoryCounter();
  beforeFirstKey(&setUp);
  return true;
}();

}  // namespace

void setUp() {
  static const bool done = [] {
    runSelfTests();
    pthread_atfork(&lockBeforeFork, &unlockAfterFork, &unlockAfterFork);
    return true;
  }();
  static_cast<void>(done);
}

const char* builtForTorch() noexcept {
  // For the tests of this package, as in torch_internals/self_tests.cpp.
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && std::string_view{broken} == "library" ? "2.0.1" : TORCH_VERSION;
}

}  // namespace torchext
