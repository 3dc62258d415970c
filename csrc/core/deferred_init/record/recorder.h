#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

namespace torchext {

// NOTE [Recording below autograd]
//
// A user's call reaches our code twice: the fallback of `DeferredInit`, above autograd and autocast, and the handler of
// `Fake`, below both. It is recorded in the second place, because the kernels in between also call operators, which
// results and gradients depend on:
//
//   * autograd copies the value that an in-place operator is about to overwrite, if its formula reads it (`pow_`);
//   * it calls pack functions of `saved_tensors_hooks`, `setup_context` of custom operators, formulas of tangents;
//   * autocast casts arguments, which autograd then saves;
//   * lazy conjugation and negation are resolved.
//
// All of these arrive at the handler as operators on deferred tensors, and are recorded as such, in the order in which
// they happen. A call that runs at once, because it needs values or writes into a real tensor, has also passed
// autograd, so its results have gradients.
//
// The decisions that must be made above autograd are: composite operators are decomposed, constants are lifted,
// collectives run, and real calls leave the recorder permanently.

// The backend fallback of the `DeferredInit` key. See csrc/README.md.
void deferredInitFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Sets the hooks of `HandlersRecorder`: NOTE [Calls of handlers]. Call before there are deferred tensors.
void setHandlersRecorder() noexcept;

// How the recorder handles a call.
enum class RecorderOutcome : std::uint8_t {
  kDecomposes,     // redispatches to the keys below; operators that the composite calls arrive here again
  kPassesOn,       // redispatches to the keys below, to be recorded at `Fake`; operators called on the way arrive here
  kPassesOnBelow,  // redispatches to the keys below without `DeferredInit`: the call has no deferred tensors
  kLifts,          // keeps the bytes of its argument, a constant
  kCommunicates,   // makes its deferred arguments real, and calls it again: NOTE [Collectives]
  kSynchronizes,   // waits for other processes, with a real tensor
  kShows,          // makes a real tensor show the storage of a deferred one, as `set_()` does
  kRunsForReal,    // computes its deferred arguments, and runs it on them immediately
  kRunsAsFake,     // runs it as a fake call
  kRecords,        // records the call, and runs it as a fake call
};

// Returns the decision of the fallback, or, below autograd, that for a call that the handler of `Fake` hands over.
TORCHEXT_API RecorderOutcome predictRecorder(const c10::OperatorHandle& op,
                                             c10::DispatchKeySet keys,
                                             const torch::jit::Stack& arguments,
                                             bool is_below_autograd);

}  // namespace torchext
