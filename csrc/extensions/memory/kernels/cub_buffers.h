#pragma once

// The temporary storage of the CUB algorithms that PyTorch's kernels call (cub.cuh in ATen/cuda).

#include <cstdint>

namespace torchext {

// A sort of `count` keys with values, by the `bits` lowest bits of the keys.
struct CubSort {
  std::int64_t count;
  std::int64_t key_bytes;
  std::int64_t value_bytes;  // 0 without values
  std::int64_t bits;
};

// Return the temporary storage of each algorithm, in bytes.
std::int64_t cubRadixSortBytes(const CubSort& sort);
std::int64_t cubSegmentedSortBytes(const CubSort& sort);
std::int64_t cubScanBytes(std::int64_t count, std::int64_t number_bytes);
std::int64_t cubScanByKeyBytes(std::int64_t count);
std::int64_t cubUniqueByKeyBytes(std::int64_t count);

}  // namespace torchext
