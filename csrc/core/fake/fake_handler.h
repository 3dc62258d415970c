#pragma once

#include <cstdint>
#include <exception>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

#include "meta/meta_call.h"

namespace torchext {

// The backend fallback of the `Fake` key: runs the operator for its metadata only. See csrc/README.md.
void fakeFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The ways in which the fallback handles a call without a recipe of the metadata cache. The first two are decided
// before the cache lookup.
enum class FakeOutcome : std::uint8_t {
  kPassesOn,    // passes it on to the keys below, because Python comes first (before 2.13)
  kRecords,     // passes it to the recorder of deferred_init: NOTE [Calls of handlers]
  kRunsReal,    // passes it on with `Fake` excluded: the call does not concern fakes
  kLifts,       // makes a fake of its argument, a constant
  kPins,        // copies the metadata of its argument
  kDecomposes,  // runs the operator's composite kernel
  kHandled,     // leaves it to an extension: CallHandler in hooks.h
  kRunsOnMeta,  // runs it on the Meta kernels, or raises an error if it cannot
  kRefuses,     // raises an error
};

// The outcome, with the data for carrying it out. Each call is decided once. The decision is then carried out, or
// reported by `predictFake()`.
struct FakeDecision {
  FakeOutcome outcome;
  MetaPlan plan = {};                    // of a call that runs on Meta
  std::exception_ptr refusal = nullptr;  // of a call that is refused
  const CallHandler* handler = nullptr;  // of a call that an extension handles
  HandledCall handled = {};

  // Returns the error that the call raises before anything is run, or null.
  std::exception_ptr error() const noexcept {
    return outcome == FakeOutcome::kRunsOnMeta ? plan.refusal : refusal;
  }
};

// Returns the fallback's decision for the call of `op` with `arguments` on this thread. Runs no operator, and does not
// change the cache.
TORCHEXT_API FakeDecision predictFake(const c10::OperatorHandle& op,
                                      c10::DispatchKeySet keys,
                                      const torch::jit::Stack& arguments);

// Returns true if factories on this thread make fakes.
bool isFakeMode();

// Counts the memory of a call: what its kernel allocates, if `has_new` or `scratch`, and what the counter derives from
// its arguments. Storages that deferred_init records, or a fake implementation makes, are not counted.
void countCall(
    const c10::OperatorHandle& op, Arguments arguments, const KernelScratch* scratch, Arguments results, bool has_new);

}  // namespace torchext
