#pragma once

#include "transforms.h"

namespace torchext {

// The kernels for processors with AVX2, FMA and F16C; null on others.
const KindOfLanes* avx2Lanes();

}  // namespace torchext
