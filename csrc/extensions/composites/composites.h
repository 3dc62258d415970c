#pragma once

#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// Registers the kernels of NOTE [Composites that read memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

// NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results with a factory
// (`mul_zerotensor()` in BinaryOps.cpp). When the first fake of such zeros is made, this makes their results fake, also
// outside of fake_mode(). Elementwise calls on fakes then take a few tenths of a microsecond longer. Never returns a
// follower.
std::unique_ptr<CallFollower> followZerosOfForwardAd(const c10::OperatorHandle& op,
                                                     const torch::jit::Stack& stack,
                                                     c10::function_ref<bool()> decomposes);

// Most operators do not handle the negative and the conjugate bit. For them, PyTorch's fallback (MathBitsFallback.h)
// passes a clone of an `out` with such a bit, and then resizes the `out` without the dispatcher. This makes such
// outputs resizable, for all operators of `aten`. Call it before the first fake has one of the bits: most programs have
// no such fake, and it registers 900 kernels.
void makeOutputsWithMathBitsResizable();

}  // namespace torchext
