#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Fills memory with `count` values, as one piece of a fill (random_fill.h), and advances the engine.
using FillMethod = void (*)(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

// Returns the method that computes the pieces of a fill of `count` values bitwise equal to PyTorch's operator. Null for
// arguments that PyTorch rejects, normal fills of less than 16 elements (which draw differently), dtypes without such
// fills, and engine states that PyTorch does not produce.
FillMethod fillMethodFor(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

// Returns true if torchext has a kernel for the fill on this processor. Whether its results equal PyTorch's is
// determined in exactness.h.
bool hasOwnKernel(const RandomFill& fill);

// Fills memory by that kernel, and advances the engine. For Distribution::Normal, `count` must be at least
// kNormalChunk.
void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

// Fills memory by PyTorch's CPU kernel, and advances the engine. Modes, torchext handlers, autograd, autocast and
// profilers of the thread do not observe the call, and user generators stay unchanged.
void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

}  // namespace torchext
