#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Returns true if there is a kernel of our own for the fill on this processor. Whether it computes what PyTorch does is
// another question: exactness.h.
bool hasOwnKernel(const RandomFill& fill);

// Fills memory by that kernel, and moves the engine. For Distribution::Normal, `count` is kNormalChunk at least.
void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

}  // namespace torchext
