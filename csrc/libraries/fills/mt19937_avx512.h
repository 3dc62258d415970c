#pragma once

#include <cstddef>
#include <cstdint>

namespace torchext::mt19937 {

// `nextBlocks()` by AVX-512. Requires `hasAvx512()` (avx512.h).
void nextBlocksByAvx512(std::uint32_t* state, std::size_t count);

}  // namespace torchext::mt19937
