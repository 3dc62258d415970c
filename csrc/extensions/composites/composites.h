#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace torchext {

// Registers the kernels of NOTE [Composites that read memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

// Prepares operators for fakes with lazy bits, which are rare. Call it before a fake gets one.
//
//   * NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results with a factory
//     (`mul_zerotensor()` in BinaryOps.cpp). This makes these results fake, also outside of fake_mode(). Elementwise
//     calls on fakes then take a few tenths of a microsecond longer.
//   * Most operators do not handle the negative and the conjugate bit. For them, PyTorch's fallback
//     (MathBitsFallback.h) passes a clone of an `out` with such a bit, and then resizes the `out` without the
//     dispatcher. This makes such outputs resizable, for all operators of `aten`: it registers 900 kernels.
void prepareOperatorsForLazyBits(c10::DispatchKeySet bits);

}  // namespace torchext
