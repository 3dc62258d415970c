#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Calls `op`, which is composed of other operators, with the keys `below` ours, so that those are recorded.
//
// Its kernel may also read the memory of an argument. Mostly those are indices or lengths (`tensor_split`, `ctc_loss`).
// Then only these are computed, and the rest is recorded. Otherwise (`_sobol_engine_draw`) the whole call runs at once.
void callComposite(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

}  // namespace torchext
