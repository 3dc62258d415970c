#pragma once

#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../fills/fill.h"
#include "../../fills/random_fill.h"

namespace torchext {

// Does what calling `op` with `stack` does, where that is a random fill of contiguous memory on the CPU which can be
// computed sooner than by PyTorch, with the same bits: `fillRandomly()`. `generator` is the one to draw from. Returns
// false, and has done nothing, where the operator is to be called. `after` is as in fill.h.
bool replayFill(const c10::OperatorHandle& op,
                torch::jit::Stack& stack,
                const at::Generator& generator,
                AfterStretch after = doNothing);

// Calls `op` with `stack` and `generator` in the place of its own, computing it so where that can be done.
void callWithGenerator(const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Generator& generator);

// Which distribution `op` fills a tensor with by `fillRandomly()`, and calls `after`, or nothing.
std::optional<Distribution> distributionOf(const c10::OperatorHandle& op);

}  // namespace torchext
