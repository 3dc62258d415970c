#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/macros.h>

namespace torchext {

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
  void passOn();

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

// The fallback of `kMarksKey`.
void marksFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
