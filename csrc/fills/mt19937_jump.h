#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// Advances `state` by `draws` calls of `at::mt19937::operator()`, without making them.
//
// Short distances are computed block by block (624 words), without tempering. For long ones the state is multiplied by
// x^n modulo the generator's characteristic polynomial over GF(2) (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer:
// "Efficient Jump Ahead for F2-Linear Random Number Generators", 2008), which takes a millisecond for any distance.
void advance(at::mt19937_data_pod& state, std::uint64_t draws);

}  // namespace torchext
