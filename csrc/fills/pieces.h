#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include <c10/core/ScalarType.h>

#include "random_fill.h"

namespace torchext {

// How a fill may be cut, so that pieces that are filled by themselves have the values of the whole: each but the last
// is `size` long, a multiple of kNormalChunk, and the last one takes what is left, kNormalChunk values at least,
// because PyTorch computes shorter ones in another way, and the end of each fill twice.
struct Pieces {
  std::int64_t total;
  std::int64_t size;
  std::int64_t count = std::max<std::int64_t>(1, (total - kNormalChunk + size) / size);

  std::pair<std::int64_t, std::int64_t> piece(std::int64_t index) const {
    return {index * size, index + 1 == count ? total : (index + 1) * size};
  }
};

// How many random numbers of 32 bits a value is made of, where it is not one of the last; 0 for other dtypes than
// floating-point ones with random fills.
constexpr std::uint64_t drawsOfValue(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
    case c10::kBFloat16:
    case c10::kHalf:
      return 1;
    case c10::kDouble:
      return 2;
    default:
      return 0;
  }
}

// How many numbers our kernels draw for the `rest` values of a normal fill that are in no whole chunk, before the last
// chunk is computed again. They have been drawn by then if the memory is where PyTorch draws to, which is so for
// float32.
constexpr std::int64_t drawsOfRest(c10::ScalarType dtype, std::int64_t rest) {
  return dtype == c10::kFloat ? rest : 0;
}

}  // namespace torchext
