#include "cub_buffers.h"

#include <algorithm>
#include <array>

#include "arithmetic.h"

namespace torchext {

namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) {
  return divideRoundingUp(bytes, kAlignment) * kAlignment;
}

// `AliasTemporaries()`: each part, and possibly the whole, is aligned to 256 bytes.
std::int64_t alias(std::int64_t bytes) {
  return bytes + kAlignment - 1;
}

// `size`: the number of elements that a thread block sorts at once (tunings for sm90). `single`: the largest number
// that one block sorts alone.
struct RadixTile {
  std::int64_t key_bytes;
  std::int64_t value_bytes;
  std::int64_t size;
  std::int64_t single;
};

constexpr std::array<RadixTile, 6> kRadixTiles{{
    {1, 8, 3456, 2304},
    {2, 8, 5632, 2304},
    {4, 8, 5376, 2304},
    {8, 8, 4608, 2304},
    {4, 4, 6528, 4864},
    {8, 0, 5760, 2304},
}};

RadixTile tileFor(const CubSort& sort) {
  const auto* found = std::find_if(kRadixTiles.begin(), kRadixTiles.end(), [&sort](const RadixTile& tile) {
    return tile.key_bytes == sort.key_bytes && tile.value_bytes == sort.value_bytes;
  });
  return found == kRadixTiles.end() ? kRadixTiles[3] : *found;
}

// The state of the tiles of a scan.
std::int64_t tileStates(std::int64_t count, std::int64_t tile, std::int64_t state_bytes) {
  constexpr std::int64_t kPadding = 32;
  return aligned((divideRoundingUp(count, tile) + kPadding) * state_bytes);
}

}  // namespace

// One pass per byte of the key ("onesweep"), from one buffer to another.
std::int64_t cubRadixSortBytes(const CubSort& sort) {
  const RadixTile tile = tileFor(sort);
  if (sort.count <= tile.single) {
    return 1;
  }
  constexpr std::int64_t kDigits = 256;
  const std::int64_t passes = divideRoundingUp(sort.bits, 8);
  const std::int64_t bins = passes * kDigits * 8;
  const std::int64_t look_back = divideRoundingUp(sort.count, tile.size) * kDigits * 4;
  const std::int64_t counters = aligned(passes * 4);
  const std::int64_t buffers =
      passes > 1 ? aligned(sort.count * sort.key_bytes) + aligned(sort.count * sort.value_bytes) : 0;
  return alias(bins + look_back + counters + buffers);
}

std::int64_t cubSegmentedSortBytes(const CubSort& sort) {
  return alias(aligned(sort.count * sort.key_bytes) + aligned(sort.count * sort.value_bytes));
}

// For numbers of 4 bytes a state is a word. Larger numbers and halves have more items or words.
std::int64_t cubScanBytes(std::int64_t count, std::int64_t number_bytes) {
  switch (number_bytes) {
    case 2:
      return alias(tileStates(count, 7680, 16) + kAlignment);
    case 4:
      return alias(tileStates(count, 1920, 8) + kAlignment);
    default:
      return alias(tileStates(count, 896, 16) + kAlignment);
  }
}

std::int64_t cubScanByKeyBytes(std::int64_t count) {
  constexpr std::int64_t kTile = 2464;
  return alias(tileStates(count, kTile, 16) + aligned((divideRoundingUp(count, kTile) + 1) * 8));
}

std::int64_t cubUniqueByKeyBytes(std::int64_t count) {
  return alias(tileStates(count, 2432, 8) + (2 * kAlignment));
}

}  // namespace torchext
