#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/macros.h>

#include "../torch_internals/keys_of_tests.h"

namespace torchext {

// The key of marked tensors: the one that PyTorch has for modes in tests, which is above all others in ordinary use.
constexpr c10::DispatchKey kMarksKey = kKeyOfModesInTests;

// The features that share the key, in the order in which they handle a call: marks_handlers.h.
enum class MarksFeature : std::uint8_t { kOrigins, kAmp };
constexpr std::size_t kNumMarksFeatures = 2;

// NOTE [Who needs the key of marked tensors]
//
// Calls with marked arguments reach the fallback of the key, and so do all calls on a thread that includes the key. A
// feature that has to see all calls on a thread demands the key there, and the thread includes the key while at least
// one feature does. So no feature has to know of another one, or to guess who has included the key.
//
// PyTorch changes the keys of a thread, too, without notice: its guards restore what they have found, and
// `at::ThreadLocalState` copies the keys of one thread to another. So while the key is not included, no demand counts;
// and a key that is included without a demand on the thread counts as one of the first feature's, which is used with
// guards of PyTorch's: NOTE [Origins of inference tensors].

// Takes the key, for good. Cheap once that has been done. To be called before any tensor carries the key, or any thread
// includes it. If another library has taken it, raises and changes nothing.
void takeMarksKey();

// Returns true if `feature` has to see all calls on this thread.
bool isMarksKeyDemanded(MarksFeature feature) noexcept;

// Count the demands of a feature on this thread, for blocks that may be left in any order: NOTE [Guards and blocks].
// The first demand takes the key.
void demandMarksKey(MarksFeature feature);
void releaseMarksKey(MarksFeature feature) noexcept;

// Forgets the demands if PyTorch has taken the key from the thread: one of its guards, which is older than they are,
// has ended.
TORCHEXT_API void dropStaleDemands() noexcept;

// The same for code that saves and restores the state of a thread: replaces the demands of `feature` by one, or by
// none. Does nothing while the key is not ours.
void setMarksKeyDemanded(MarksFeature feature, bool is_demanded) noexcept;

// A demand that lasts as long as the object. Takes the key. Holds no lease.
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
