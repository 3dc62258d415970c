#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Calls `op`, which is composed of others, with the keys `below` ours, so that those others are recorded.
//
// Its kernel may do more than call operators: read the memory of an argument. Mostly those are indices or lengths
// (`tensor_split`, `ctc_loss`), so the rest is left to be recorded. Otherwise (`_sobol_engine_draw`) all of it is run
// at once.
void callComposite(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

}  // namespace torchext
