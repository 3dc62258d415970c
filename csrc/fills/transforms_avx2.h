#pragma once

#include "transforms.h"

namespace torchext {

// The kernels for processors with AVX2, FMA and F16C; null on others.
const Kernels* avx2KernelsFor(c10::ScalarType dtype);

}  // namespace torchext
