#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace torchext {

// A handler of marks_handlers.h receives calls in a self-cleaning region, and calls with AmpTensors among their
// arguments. It decides whether the call autocasts, and marks the results. csrc/README.md lists the steps. AmpOutcome
// is its action for a call.
enum class AmpOutcome : std::uint8_t {
  kPassesOn,            // to the keys below
  kPassesOnInBackward,  // the same, in a backward pass, where AmpTensors are neither autocast nor cleaned
  kAutocasts,           // to the keys below and those of autocast
  kCleans,              // to the keys below, with arguments cast to float32
};

struct AmpPrediction {
  AmpOutcome outcome;
  c10::DispatchKeySet autocast_keys;
};
AmpPrediction predictAmp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace torchext
