#pragma once

#include <torchext/macros.h>

#include "random_fill.h"

namespace torchext {

// Return whether a fill produces PyTorch's values and engine state in every bit (NOTE [Fill kernels],
// transforms.h). Determined by a comparison with PyTorch's kernel, once per process, distribution and dtype, in a few
// milliseconds. Thread-safe, independent of the state of the thread, and without effects on user state.

// By torchext's kernel, for parameters that it supports (`hasOwnKernel()`).
TORCHEXT_API bool isOwnKernelExact(Distribution distribution, c10::ScalarType dtype);

// By PyTorch's kernel on pieces, cut as in random_fill.h. False for dtypes without such fills.
TORCHEXT_API bool arePiecesExact(Distribution distribution, c10::ScalarType dtype);

}  // namespace torchext
