#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/macros.h>

#include "../../libraries/support/leases.h"

namespace torchext {

// NOTE [Marked tensors]
//
// Two features must intercept every operator on their tensors, also on real ones, above autograd: NOTE [Origins of
// inference tensors] and NOTE [AmpTensors]. PyTorch has one unused key for that, so they share it: `kMarksKey`. A
// tensor that one of them marks has the key. Its marks are an object attached to its TensorImpl as the metadata of its
// backend. Copies of a TensorImpl that share its data have both. A view made by a kernel has only the key of its base,
// until the handler of a feature marks it like its base. Calls without marked tensors do not reach the key, and cost
// nothing more.

enum class AmpMark : std::uint8_t { kNone, kWrapped, kToBeCleaned };

// The marks of a tensor. Immutable, and shared by all tensors with equal marks. Freed with the last of them.
struct TORCHEXT_API TensorMarks final : c10::BackendMeta {
  TensorMarks(std::string source_line, AmpMark amp_mark);
  C10_DISABLE_COPY_AND_ASSIGN(TensorMarks);
  ~TensorMarks() override;

  // Called by `c10::intrusive_ptr` when the last tensor with these marks has been freed.
  void release_resources() override;

  // The source line that created the tensor, or empty.
  const std::string origin;
  const AmpMark amp;

 private:
  const LeaseHold marks_{leaseOfMarks()};
  // A backward pass must distinguish formulas of autograd from recomputation.
  const LeaseHold regions_{leaseOfRegions()};
};

// A TensorImpl can hold one backend object, a BackendMeta, which PyTorch's backends leave empty, and which holds the
// marks here. Returns true if copies of the TensorImpl without its data, as by `detach()` and `.data`, keep it.
bool testBackendMeta(bool is_broken);

// Returns the number of TensorMarks in the process. While it is 0, no tensor is marked.
TORCHEXT_API std::int64_t liveMarks() noexcept;

// Returns the marks, or null if the tensor has none, or has the metadata of another backend.
TORCHEXT_API const TensorMarks* marksOf(const c10::TensorImpl& impl);

inline const std::string& originMarkOf(const c10::TensorImpl& impl) {
  static const std::string none;
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? none : marks->origin;
}

inline AmpMark ampMarkOf(const c10::TensorImpl& impl) {
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? AmpMark::kNone : marks->amp;
}

// Returns false if the tensor has the metadata of another backend, which occupies the same pointer.
bool canBeMarked(const c10::TensorImpl& impl);

// Change one of the marks, and whether the tensor has the key. No-ops for a tensor that cannot be marked: operators on
// it run as if the feature did not exist.
void setOriginMark(c10::TensorImpl& impl, const std::string& origin);
TORCHEXT_API void setAmpMark(c10::TensorImpl& impl, AmpMark amp);

// Returns an alias of the tensor without marks, detached from autograd.
TORCHEXT_API at::Tensor withoutMarks(const at::Tensor& tensor);

// The key of marked tensors: PyTorch's key for tests of modes, which is above all keys in ordinary use.
constexpr c10::DispatchKey kMarksKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

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

// A call that has reached the fallback of `kMarksKey`. It concerns the features that have marked an argument, and those
// that receive all calls on the thread. Origins handle it first.
class MarkedCall {
 public:
  MarkedCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);

  const c10::OperatorHandle& op() const noexcept {
    return op_;
  }
  c10::DispatchKeySet keys() const noexcept {
    return keys_;
  }
  torch::jit::Stack& stack() const noexcept {
    return stack_;
  }

  // Passes the call to the next feature or, after the last one, to the keys below. Calls made by kernels there do not
  // come here again.
  void passOn() {
    passOn(keys_);
  }

  // The same with other keys.
  void passOn(c10::DispatchKeySet keys);

 private:
  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  // Whether the call concerns a feature that has not yet handled it.
  bool concerns_origins_;
  bool concerns_amp_;
};

// The function by which a feature handles a call. It passes the call on once, or raises.
using MarksHandler = void (*)(MarkedCall& call);

// Sets the handler of AmpTensors: once per process, while the library is loaded.
void setHandlerOfAmp(MarksHandler handler) noexcept;

}  // namespace torchext
