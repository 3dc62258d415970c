#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../torch_internals/keys_of_tests.h"

namespace torchext {

// PyTorch has one key to spare that is above all others that do anything. It is meant for modes in tests.
constexpr c10::DispatchKey kMarksKey = kKeyOfModesInTests;

// The features that share the key, in the order in which they handle a call: marks_handlers.h.
enum class MarksFeature : std::uint8_t { kOrigins, kAmp };
constexpr std::size_t kNumMarksFeatures = 2;

// NOTE [Who needs the key of marked tensors]
//
// The fallback of the key is reached by calls with marked arguments, and by all calls on a thread that includes the
// key. A feature that has to see all calls says so here, by thread, and the thread includes the key while at least one
// feature does. So no feature has to know of another one, or to guess who has included the key.
//
// PyTorch changes the keys of a thread, too, and tells nobody: its guards put back what they have found, and
// `at::ThreadLocalState` takes the keys of one thread to another. So nothing is demanded while the key is not included;
// and a key that is included although nobody on the thread has asked for it counts as a demand of the first feature's,
// which lives with guards of PyTorch's: NOTE [Origins of inference tensors].

// Takes the key, for good. Cheap when that has been done. To be called before anything carries or includes the key;
// raises when another library has taken it, and then changes nothing.
void takeMarksKey();

// Returns true if `feature` has to see all calls on this thread.
bool isMarksKeyDemanded(MarksFeature feature) noexcept;

// Count the demands of a feature on this thread, for blocks that may be left in any order: NOTE [Guards and blocks]. The first
// takes the key.
void demandMarksKey(MarksFeature feature);
void releaseMarksKey(MarksFeature feature) noexcept;

// Forgets demands whose key PyTorch has taken from the thread: one of its guards has ended that was there before.
void dropStaleDemands() noexcept;

// The same for who saves the state of a thread and puts it back: replaces the demands of `feature` by one, or by none.
// Does nothing while the key is not ours.
void setMarksKeyDemanded(MarksFeature feature, bool is_demanded) noexcept;

// A demand for a scope. It takes the key.
class MarksDemand {
 public:
  explicit MarksDemand(MarksFeature feature);
  MarksDemand(const MarksDemand&) = delete;
  MarksDemand& operator=(const MarksDemand&) = delete;
  MarksDemand(MarksDemand&&) = delete;
  MarksDemand& operator=(MarksDemand&&) = delete;
  ~MarksDemand();

 private:
  MarksFeature feature_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace torchext
