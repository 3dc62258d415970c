#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Returns true if torchext has a kernel for the fill on this processor. Whether its results equal PyTorch's is
// determined in exactness.h.
bool hasOwnKernel(const RandomFill& fill);

// Fills memory by that kernel, and advances the engine. For Distribution::Normal, `count` must be at least
// kNormalChunk.
void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

}  // namespace torchext
