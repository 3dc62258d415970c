#pragma once

#include <cstdint>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// The backend fallback of the `Fake` key: runs the operator for its metadata only. See csrc/README.md.
void fakeFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// What the fallback would make of a call, as far as it can be told before it looks into the cache of metadata.
enum class FakeOutcome : std::uint8_t {
  kPassesOn,      // to the keys below, because Python comes first (before 2.13)
  kRunsReal,      // goes on to the keys below without `Fake`: the call is not about fakes
  kLifts,         // makes a fake of the constant that is its argument
  kPins,          // copies its argument
  kRefuses,       // raises an error: NOTE [Collectives]
  kSynchronizes,  // waits for other processes, with a real tensor
  kCommunicates,  // runs PyTorch's kernel of the collective
  kDecomposes,    // runs the operator's composite kernel
  kRunsOnSparse,  // NOTE [Sparse fakes]
  kRunsOnValues,  // NOTE [Constants keep their values]
  kDoesNothing,   // NOTE [Resizing to the same size]
  kLacksValues,   // raises an error, because it needs values and they are not known
  kLacksMeta,     // raises an error, because the operator has no Meta kernel
  kRunsOnMeta,
};
FakeOutcome foreseeFake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const torch::jit::Stack& arguments);

}  // namespace torchext
