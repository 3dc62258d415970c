#pragma once

#include "transforms.h"

namespace torchext {

// The transforms for processors with AVX2, FMA and F16C; null on others.
Transform avx2TransformFor(Distribution distribution, c10::ScalarType dtype);

}  // namespace torchext
