#pragma once

#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../libraries/fills/fill.h"
#include "../../libraries/fills/random_fill.h"

namespace torchext {

// Computes the call of `op` with `stack` if it is a random fill of contiguous CPU memory that `fillRandomly()` can do
// faster than PyTorch, with the same bits. `generator` is the one to draw from. Returns false, without an effect, if
// the caller must call the operator. `after` is as in fill.h.
bool replayFill(const c10::OperatorHandle& op,
                torch::jit::Stack& stack,
                const at::Generator& generator,
                AfterStretch after = doNothing);

// Returns the distribution of the fills `op` that `fillRandomly()` computes, calling `after`; else nothing.
std::optional<Distribution> distributionOf(const c10::OperatorHandle& op);

}  // namespace torchext
