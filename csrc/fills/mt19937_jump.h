#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// Moves `state` forward as `draws` calls of `at::mt19937::operator()` would, without making them.
//
// Short distances are walked, a block of 624 words at a time and without tempering. For long ones the state is
// multiplied by x^n modulo the generator's characteristic polynomial over GF(2) (Haramoto, Matsumoto, Nishimura,
// Panneton, L'Ecuyer: "Efficient Jump Ahead for F2-Linear Random Number Generators", 2008): a millisecond whatever the
// distance.
void advance(at::mt19937_data_pod& state, std::uint64_t draws);

}  // namespace torchext
