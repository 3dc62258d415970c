#pragma once

#include <cstdint>

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/macros.h>

#include "../../core/torch_internals/keys_of_tests.h"

namespace torchext {

// The key of marked tensors: PyTorch's key for modes in tests, which is above all keys in ordinary use.
constexpr c10::DispatchKey kMarksKey = kKeyOfModesInTests;

// The features that share the key, in the order in which they handle a call.
enum class MarksFeature : std::uint8_t { kOrigins, kAmp };

// NOTE [Demand for the key of marked tensors]
//
// Calls with marked arguments reach the fallback of the key, and so do all calls on a thread that includes the key. A
// feature that must receive all calls on a thread demands the key there, and the thread includes the key while at least
// one feature demands it. So features are independent of each other.
//
// PyTorch also changes the keys of a thread, without notice: its guards restore the previous keys, and
// `at::ThreadLocalState` copies the keys of one thread to another. So demands do not count while the key is not
// included. A key that is included without a demand on the thread counts as a demand of the first feature, which is
// used with PyTorch's guards: NOTE [Origins of inference tensors].

// Takes the key permanently. Cheap after the first call. Call it before any tensor has the key, or any thread includes
// it. Raises without changes if another library has taken the key.
void takeMarksKey();

// Returns true if `feature` must receive all calls on this thread.
bool isMarksKeyDemanded(MarksFeature feature) noexcept;

// Count the demands of a feature on this thread, for blocks that may be left in any order: NOTE [Guards and blocks].
// The first demand takes the key.
void demandMarksKey(MarksFeature feature);
void releaseMarksKey(MarksFeature feature) noexcept;

// Drops the demands if PyTorch has removed the key from the thread because a guard that is older than the demands has
// ended.
TORCHEXT_API void dropStaleDemands() noexcept;

// For code that saves and restores the state of a thread: replaces the demands of `feature` by one or none. Does
// nothing until torchext has taken the key.
void setMarksKeyDemanded(MarksFeature feature, bool is_demanded) noexcept;

// A demand for the lifetime of the object. Takes the key. Holds no lease.
class MarksDemand {
 public:
  explicit MarksDemand(MarksFeature feature);
  C10_DISABLE_COPY_AND_ASSIGN(MarksDemand);
  ~MarksDemand();

 private:
  MarksFeature feature_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace torchext
