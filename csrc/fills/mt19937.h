#pragma once

// The recurrence of MT19937, the generator of the CPU, a block of its state at a time.

#include <cstddef>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext::mt19937 {

// The parameters by their names in Matsumoto and Nishimura, "Mersenne Twister" (1998).
constexpr std::size_t kN = 624;
constexpr std::size_t kM = 397;
constexpr std::uint32_t kA = 0x9908b0dfU;

static_assert(at::MERSENNE_STATE_N == kN && at::MERSENNE_STATE_M == kM);

// Replaces the kN words of a state by those that are `count` blocks later.
void nextBlocks(std::uint32_t* state, std::size_t count);

// Replaces them by the next ones.
inline void nextBlock(std::uint32_t* state) {
  nextBlocks(state, 1);
}

// Makes random numbers of words of a state. Neither changes the words, nor needs them to be aligned.
void temper(const std::uint32_t* words, std::uint32_t* numbers, std::size_t count);

// The word of a state of which temper() makes `number`.
std::uint32_t wordOf(std::uint32_t number);

}  // namespace torchext::mt19937
