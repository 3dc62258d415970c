#pragma once

#include <cstdint>
#include <exception>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "layouts/layout.h"
#include "meta/meta_call.h"

namespace torchext {

// The backend fallback of the `Fake` key: runs the operator for its metadata only. See csrc/README.md.
void fakeFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// What the fallback does with a call, if the cache of metadata does not have it.
enum class FakeOutcome : std::uint8_t {
  kPassesOn,      // to the keys below, because Python comes first (before 2.13)
  kRecords,       // hands it to the recorder of deferred_init: NOTE [Calls of handlers]
  kRunsReal,      // goes on to the keys below without `Fake`: the call is not about fakes
  kLifts,         // makes a fake of the constant that is its argument
  kPins,          // copies its argument
  kSynchronizes,  // waits for other processes, with a real tensor
  kCommunicates,  // runs PyTorch's kernel of the collective
  kDecomposes,    // runs the operator's composite kernel
  kRunsInLayout,  // NOTE [Layouts]
  kRunsOnValues,  // NOTE [Constants keep their values]
  kDoesNothing,   // NOTE [Resizing to the same size]
  kRunsOnMeta,    // runs it on the Meta kernels, or raises why it cannot be
  kRefuses,       // raises an error
};

// The outcome, and all that it takes to bring it about. It is made once for a call, and then carried out; or it is
// reported by `predictFake()`.
struct FakeDecision {
  FakeOutcome outcome;
  MetaPlan plan = {};                     // of a call that runs on Meta
  std::exception_ptr refusal = nullptr;   // of a call that is refused
  const LayoutHandler* layout = nullptr;  // of a call that concerns one

  // What the call raises before anything is run, or null.
  std::exception_ptr error() const noexcept {
    return outcome == FakeOutcome::kRunsOnMeta ? plan.refusal : refusal;
  }
};

// Decides about the call of `op` with `arguments` on this thread. Calls nothing, and leaves the cache as it is.
FakeDecision predictFake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const torch::jit::Stack& arguments);

}  // namespace torchext
