#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/MT19937RNGEngine.h>

#include "pieces.h"

namespace torchext {

// Cuts a fill of `count` values for at most `at::get_num_threads()` threads, or for the calling thread alone inside a
// parallel region of PyTorch.
Pieces slicesOf(std::int64_t count);

// Returns the engines at the beginning of each slice, if the fill begins with `engine`.
std::vector<at::mt19937_data_pod> startsOf(const Pieces& slices,
                                           const at::mt19937_data_pod& engine,
                                           std::uint64_t draws_of_value);

}  // namespace torchext
