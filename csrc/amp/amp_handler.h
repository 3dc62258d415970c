#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace torchext {

// Calls in a self-cleaning region, or with AmpTensors among their arguments, come to a handler of marks_handlers.h,
// which decides whether the call autocasts, and what its results are. csrc/README.md tells the steps. This is what it
// would do to a call.
enum class AmpOutcome : std::uint8_t {
  kPassesOn,            // to the keys below
  kPassesOnInBackward,  // the same; there AmpTensors are neither autocast nor cleaned
  kAutocasts,           // to the keys below and those of autocast
  kCleans,              // to the keys below, with arguments cast to float32
};

struct AmpPrediction {
  AmpOutcome outcome;
  c10::DispatchKeySet autocast_keys;
};
AmpPrediction predictAmp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace torchext
