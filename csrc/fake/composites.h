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

}  // namespace torchext
