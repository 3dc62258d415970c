#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Fills memory with `count` values, as one of the pieces of a fill (pieces.h), and moves the engine.
using FillMethod = void (*)(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

// How to compute the pieces of a fill of `count` values with the bits of PyTorch's operator. Null where that is not
// known: for arguments that PyTorch refuses, normal fills of less than 16 elements, which draw differently, dtypes that
// no such fills are known of, and engines in a state that PyTorch would not leave them in.
FillMethod fillMethodFor(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

}  // namespace torchext
