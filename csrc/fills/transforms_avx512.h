#pragma once

#include "transforms.h"

namespace torchext {

// The kernels for processors with the AVX-512 of servers since 2017, where PyTorch uses it; null on others.
const KindOfLanes* avx512Lanes();

}  // namespace torchext
