#pragma once

// Integer arithmetic of kernel launches.

#include <cstdint>

namespace torchext {

inline std::int64_t divideRoundingUp(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Returns the largest power of two up to `n`.
inline std::int64_t lastPowerOf2(std::int64_t n) {
  std::int64_t power = 1;
  while (power * 2 <= n) {
    power *= 2;
  }
  return power;
}

// `get_num_bits()`: the number of bits of numbers up to `largest`.
inline std::int64_t countBits(std::int64_t largest) {
  std::int64_t bits = 1;
  while ((largest >>= 1) != 0) {
    ++bits;
  }
  return bits;
}

}  // namespace torchext
