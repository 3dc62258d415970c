#pragma once

// What the algorithms of CUB allocate, which PyTorch's kernels call (cub.cuh in ATen/cuda).

#include <cstdint>

namespace torchext {

// Sorts `count` keys, by their `bits` lowest bits, with values.
struct CubSort {
  std::int64_t count;
  std::int64_t key_bytes;
  std::int64_t value_bytes;  // 0 if there are none
  std::int64_t bits;
};

// The temporary storage of the algorithms, in bytes.
std::int64_t cubRadixSortBytes(const CubSort& sort);
std::int64_t cubSegmentedSortBytes(const CubSort& sort);
std::int64_t cubScanBytes(std::int64_t count, std::int64_t number_bytes);
std::int64_t cubScanByKeyBytes(std::int64_t count);
std::int64_t cubUniqueByKeyBytes(std::int64_t count);

}  // namespace torchext
