#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include <c10/core/ScalarType.h>

namespace torchext {

enum class Distribution : std::uint8_t { Uniform, Normal };

constexpr int kDistributions = 2;

// The arguments of `at::uniform_(from, to)` or `at::normal_(mean, std)`.
struct RandomFill {
  Distribution distribution;
  c10::ScalarType dtype;
  double first;   // from, or mean
  double second;  // to, or std
};

// PyTorch computes normal values from this many random numbers at a time: the first half are radii, the second half
// angles.
constexpr std::int64_t kNormalChunk = 16;

// Cuts a fill so that pieces that are filled separately have the values of the whole. Each piece but the last is `size`
// long, a multiple of kNormalChunk. The last piece has the rest, at least kNormalChunk values, because PyTorch computes
// shorter fills in another way, and the end of each fill twice.
struct Pieces {
  std::int64_t total;
  std::int64_t size;
  std::int64_t count = std::max<std::int64_t>(1, (total - kNormalChunk + size) / size);

  std::pair<std::int64_t, std::int64_t> piece(std::int64_t index) const {
    return {index * size, index + 1 == count ? total : (index + 1) * size};
  }
};

// Returns the number of random 32-bit numbers per value, except for the last values of a fill. 0 for dtypes without
// random fills.
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

// Returns the number of random numbers that torchext's kernels draw for the `rest` values of a normal fill outside
// whole chunks, before the last chunk is computed again. They have already been drawn if PyTorch draws into the memory
// of the fill, as for float32.
constexpr std::int64_t drawsOfRest(c10::ScalarType dtype, std::int64_t rest) {
  return dtype == c10::kFloat ? rest : 0;
}

}  // namespace torchext
