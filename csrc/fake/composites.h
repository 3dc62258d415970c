#pragma once

#include <torch/library.h>

namespace torchext {

// Registers the kernels of NOTE [Composites that look at memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

// NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results by a factory (`mul_zerotensor()`
// in BinaryOps.cpp). To be called before the first fake of such zeros is made; makes what these kernels allocate fake,
// too, outside of fake_mode(). Elementwise calls on fakes cost a few tenths of a microsecond more from then on.
void makeResultsOfZerosFake();

}  // namespace torchext
