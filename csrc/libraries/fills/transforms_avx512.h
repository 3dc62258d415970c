#pragma once

#include "transforms.h"

namespace torchext {

// Returns the kernels for processors with the AVX-512 of servers since 2017, if PyTorch uses it, or null.
const KindOfLanes* avx512Lanes();

}  // namespace torchext
