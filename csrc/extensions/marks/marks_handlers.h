#pragma once

#include <cstddef>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include "marks_key.h"

namespace torchext {

// A set of features.
class MarksFeatures {
 public:
  constexpr MarksFeatures() = default;
  constexpr MarksFeatures(MarksFeature feature, bool is_member)
      : bits_{is_member ? 1U << static_cast<unsigned>(feature) : 0U} {}

  constexpr bool has(MarksFeature feature) const noexcept {
    return ((bits_ >> static_cast<unsigned>(feature)) & 1U) != 0;
  }
  constexpr MarksFeatures operator|(MarksFeatures other) const noexcept {
    MarksFeatures both;
    both.bits_ = bits_ | other.bits_;
    return both;
  }

 private:
  unsigned bits_ = 0;
};

// A call that has reached the fallback of `kMarksKey`, and the features that it concerns: those that have marked an
// argument, and those that receive all calls on the thread.
class MarkedCall {
 public:
  MarkedCall(const c10::OperatorHandle& op,
             c10::DispatchKeySet keys,
             torch::jit::Stack& stack,
             MarksFeatures features) noexcept
      : op_{op}, keys_{keys}, stack_{stack}, features_{features} {}

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
  MarksFeatures features_;
  // The first feature that has not yet handled the call.
  std::size_t next_ = 0;
};

// The function by which a feature handles a call. It passes the call on once, or raises.
using MarksHandler = void (*)(MarkedCall& call);

// Registers the handler of a feature: once per process, while the library is loaded.
void registerMarksHandler(MarksFeature feature, MarksHandler handler) noexcept;

// The fallback of `kMarksKey`.
void marksFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
