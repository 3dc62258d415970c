#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/MT19937RNGEngine.h>

#include "pieces.h"

namespace torchext {

// A fill of `count` values, cut for the threads that it may use: `at::get_num_threads()` at most, and only this one in
// a parallel region of PyTorch's.
Pieces slicesOf(std::int64_t count);

// The engines with which the slices begin, where the whole begins with `engine`.
std::vector<at::mt19937_data_pod> startsOf(const Pieces& slices,
                                           const at::mt19937_data_pod& engine,
                                           std::uint64_t draws_of_value);

}  // namespace torchext
