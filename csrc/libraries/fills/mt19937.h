#pragma once

// The recurrence of MT19937, PyTorch's CPU generator, one block of its state at a time.

#include <cstddef>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext::mt19937 {

// The parameters, named as in Matsumoto and Nishimura, "Mersenne Twister" (1998).
constexpr std::size_t kN = 624;
constexpr std::size_t kM = 397;
constexpr std::uint32_t kA = 0x9908b0dfU;

static_assert(at::MERSENNE_STATE_N == kN && at::MERSENNE_STATE_M == kM);

// Advances the kN words of a state by `count` blocks.
void nextBlocks(std::uint32_t* state, std::size_t count);

// Advances them by one block.
inline void nextBlock(std::uint32_t* state) {
  nextBlocks(state, 1);
}

// `nextBlocks()` by AVX-512. Requires `hasAvx512()` (avx512.h).
void nextBlocksByAvx512(std::uint32_t* state, std::size_t count);

// Computes random numbers from the words of a state. The words stay unchanged and need no alignment.
void temper(const std::uint32_t* words, std::uint32_t* numbers, std::size_t count);

// Returns the word from which temper() computes `number`.
std::uint32_t wordOf(std::uint32_t number);

}  // namespace torchext::mt19937
