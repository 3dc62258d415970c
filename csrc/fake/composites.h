#pragma once

#include <torch/library.h>

namespace torchext {

// Registers the kernels of NOTE [Composites that read memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

// NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results with a factory
// (`mul_zerotensor()` in BinaryOps.cpp). This makes them fake, also outside of fake_mode(). Call before the first fake
// of such zeros is made. Elementwise calls on fakes then take a few tenths of a microsecond longer.
void makeResultsOfZerosFake();

// Most operators do not handle the negative and the conjugate bit. For them, PyTorch's fallback (MathBitsFallback.h)
// passes a clone of an `out` with such a bit, and then resizes the `out` without the dispatcher. This makes such
// outputs resizable, for all operators of `aten`. Call it before the first fake has one of the bits: most programs have
// no such fake, and it registers 900 kernels.
void makeOutputsWithMathBitsResizable();

}  // namespace torchext
