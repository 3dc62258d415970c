#pragma once

#include <cstddef>
#include <cstdint>

namespace torchext {

// Computes c_k, the sum over i of p_i * a_{i+k} over GF(2), for 64 * n bits of p and of c. Each word holds 64 bits.
//
// Args:
//   n: The number of words of p and of c. A power of two times a number of at most 64.
//   reversed: The words of p, with the bits of each word reversed.
//   a: 2 * n words.
//   c: Receives n words. Must not overlap the others.
//
// Takes three products of half the size (Karatsuba), down to products by the instruction for carryless multiplication.
void multiplyHankel(std::size_t n, const std::uint64_t* reversed, const std::uint64_t* a, std::uint64_t* c);

}  // namespace torchext
