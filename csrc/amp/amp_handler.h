#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Handles a call in a self-cleaning region, or with AmpTensors among its arguments: decides whether the call autocasts,
// and what its results are. csrc/README.md tells the steps.
void ampFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// What it would do to a call.
enum class AmpOutcome : std::uint8_t {
  kPassesOn,            // to the keys below
  kPassesOnInBackward,  // the same; there identity neither casts nor cleans
  kAutocasts,           // to the keys below and those of autocast
  kCleans,              // to the keys below, with arguments cast to float32
};

struct ForeseenAmp {
  AmpOutcome outcome;
  c10::DispatchKeySet autocast_keys;
};
ForeseenAmp foreseeAmp(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const torch::jit::Stack& arguments);

}  // namespace torchext
