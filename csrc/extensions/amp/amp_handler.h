#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torchext/macros.h>

namespace torchext {

// A handler of marks_key.h receives all calls in a self-cleaning region, and all calls with AmpTensors among their
// arguments. It excludes its key for the calls that it makes, so it runs once for a composite, not for each of its
// parts. Its steps:
//
//   1. Classify the arguments: wrapped, or made inside of a self-cleaning region and due for cleaning here.
//   2. Pass on the operators of a backward pass: its formulas run in the dtypes of the forward pass. Recomputed
//      operators are handled as outside of the pass, and so are mixtures of dtypes in a user-defined function.
//   3. Autocast a call with a wrapped argument, unless an open region decides.
//   4. Clean a call with an argument due for cleaning: cast it to float32, and cast written arguments back. Views and
//      factories are unchanged.
//   5. Pass on all other calls.
//   6. Mark the results: wrapped, to be cleaned, or neither. Returned arguments keep their marks.
//
// AmpOutcome is its action for a call.
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
TORCHEXT_API AmpPrediction predictAmp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Registers the handler. Call while the library is loaded.
void registerAmpHandler();

}  // namespace torchext
