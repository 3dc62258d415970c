#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "../fake/calls/recording.h"

namespace torchext {

// The backend fallback of the `DeferredInit` key: records the operator and lets it go on as a fake one. See
// csrc/README.md.
void deferredInitFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// NOTE [Calls of handlers] in fake/calls/recording.h.
HandlersRecorder handlersRecorder() noexcept;

// What the fallback does with a call.
enum class RecorderOutcome : std::uint8_t {
  kDecomposes,     // goes on to the keys below; what the composite operator calls comes here again
  kPassesOn,       // goes on to the keys below, to a mode or subclass of the user's; what that calls comes here again
  kPassesOnBelow,  // goes on to the keys below without `DeferredInit`: the call is not about deferred tensors
  kLifts,          // keeps the bytes of the constant that is its argument
  kCommunicates,   // makes its deferred arguments real, and is called again: NOTE [Collectives]
  kSynchronizes,   // waits for other processes, with a real tensor
  kRunsForReal,    // computes its deferred arguments, and runs it on them at once
  kRunsAsFake,     // goes on to the keys below and to `Fake`
  kRecords,        // notes the call, and goes on as a fake one
};
RecorderOutcome predictRecorder(const c10::OperatorHandle& op,
                                c10::DispatchKeySet keys,
                                const torch::jit::Stack& arguments);

}  // namespace torchext
