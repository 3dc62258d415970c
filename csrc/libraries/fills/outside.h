#pragma once

// Finds values out of bounds, over lanes (NOTE [Fill kernels], transforms.h). Include it only where lanes are
// defined.

#include <cstdint>

#include "random_fill.h"

namespace torchext {

namespace {

template <typename Lanes, typename Element>
void valuesOutside(const void* values, std::int64_t count, float low, float high, std::uint16_t* masks) {
  using L = Lanes;
  const auto lows = L::all(low);
  const auto highs = L::all(high);
  const auto* from = static_cast<const Element*>(values);
  for (std::int64_t i = 0; i < count; i += kNormalChunk) {
    std::uint32_t mask = 0;
    for (std::int64_t j = 0; j < kNormalChunk; j += L::kCount) {
      const auto value = L::load(from + i + j);
      mask |= L::bitsOfMask((value < lows) | (highs < value)) << j;
    }
    masks[i / kNormalChunk] = static_cast<std::uint16_t>(mask);
  }
}

}  // namespace

}  // namespace torchext
