#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>
#include <torchext/macros.h>

#include "random_fill.h"

namespace torchext {

// Fills memory with `count` values, as one piece of a fill (random_fill.h), and advances the engine.
using FillMethod = void (*)(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

// Returns the method that computes the pieces of a fill of `count` values bitwise equal to PyTorch's operator. Null for
// arguments that PyTorch rejects, normal fills of less than 16 elements (which draw differently), dtypes without such
// fills, and engine states that PyTorch does not produce.
FillMethod fillMethodFor(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

// Fills memory by torchext's kernel, and advances the engine. For Distribution::Normal, `count` must be at least
// kNormalChunk.
void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

// Return whether a fill produces PyTorch's values and engine state in every bit (NOTE [Fill kernels],
// transforms.h). Determined by a comparison with PyTorch's kernel, once per process, distribution and dtype, in a few
// milliseconds. Thread-safe, independent of the state of the thread, and without effects on user state.

// By torchext's kernel, for parameters that it supports.
TORCHEXT_API bool isOwnKernelExact(Distribution distribution, c10::ScalarType dtype);

// By PyTorch's kernel on pieces, cut as in random_fill.h. False for dtypes without such fills.
TORCHEXT_API bool arePiecesExact(Distribution distribution, c10::ScalarType dtype);

}  // namespace torchext
