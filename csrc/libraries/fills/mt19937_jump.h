#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// Whether the same distance is expected again.
enum class Recurs : std::uint8_t { kNo, kYes };

// Advances `state` by `draws` calls of `at::mt19937::operator()`, without making them.
//
// Short distances are computed block by block (624 words), without tempering. For long ones the state is multiplied by
// x^n modulo the generator's characteristic polynomial over GF(2) (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer:
// "Efficient Jump Ahead for F2-Linear Random Number Generators", 2008). The product takes 0.1 ms and its polynomial 1
// ms for any distance. Polynomials of distances that recur are cached; other distances are several products, of cached
// polynomials for powers of two, and a walk over the rest.
void advance(at::mt19937_data_pod& state, std::uint64_t draws, Recurs recurs = Recurs::kYes);

}  // namespace torchext
