#pragma once

#include "transforms.h"

namespace torchext {

// Returns the kernels for processors with AVX2, FMA and F16C, or null.
const KindOfLanes* avx2Lanes();

}  // namespace torchext
