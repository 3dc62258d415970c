#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "../../fake/calls/recording.h"

namespace torchext {

// NOTE [Recording below autograd]
//
// A call of the user's is met twice: by the fallback of `DeferredInit`, above autograd and autocast, and by the handler
// of `Fake`, below both. It is recorded there, because the kernels in between do more than pass the call on. They make
// operators of their own, which results and gradients depend on:
//
//   * autograd copies what an in-place operator is about to overwrite, if its formula reads it (`pow_`);
//   * it calls pack functions of `saved_tensors_hooks`, `setup_context` of custom operators, formulas of tangents;
//   * autocast casts arguments, which autograd then saves;
//   * lazy conjugation and negation are resolved.
//
// All of them arrive at the handler as operators on deferred tensors, and are recorded as such, in the order in which
// they happen. Where a call is run at once, because it needs values or writes into a real tensor, autograd has seen it
// too, so that its results have gradients.
//
// Above autograd is decided what has to be decided there: composite operators fall apart, constants are lifted,
// collectives are run, and real calls leave for good.

// The backend fallback of the `DeferredInit` key. See csrc/README.md.
void deferredInitFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// How the handler of `Fake` records: NOTE [Calls of handlers] in fake/calls/recording.h.
HandlersRecorder handlersRecorder() noexcept;

// What becomes of a call.
enum class RecorderOutcome : std::uint8_t {
  kDecomposes,     // goes on to the keys below; what the composite operator calls comes here again
  kPassesOn,       // goes on to the keys below, to be recorded at `Fake`; what is called on the way comes here again
  kPassesOnBelow,  // goes on to the keys below without `DeferredInit`: the call is not about deferred tensors
  kLifts,          // keeps the bytes of the constant that is its argument
  kCommunicates,   // makes its deferred arguments real, and is called again: NOTE [Collectives]
  kSynchronizes,   // waits for other processes, with a real tensor
  kShows,          // has a real tensor show the storage of a deferred one, as `set_()` does
  kRunsForReal,    // computes its deferred arguments, and runs it on them at once
  kRunsAsFake,     // runs it as a fake one
  kRecords,        // notes the call, and runs it as a fake one
};

// Returns what the fallback would do.
RecorderOutcome predictRecorder(const c10::OperatorHandle& op,
                                c10::DispatchKeySet keys,
                                const torch::jit::Stack& arguments);

// Returns what would be done when the handler of `Fake` has handed the call over.
RecorderOutcome predictRecorderBelowAutograd(const c10::OperatorHandle& op,
                                             c10::DispatchKeySet keys,
                                             const torch::jit::Stack& arguments);

}  // namespace torchext
