#pragma once

#include <torchext/macros.h>

#include "random_fill.h"

namespace torchext {

// How a fill may be computed so that every bit of the values and of the engine afterwards is PyTorch's (NOTE [Kernels
// of our own], transforms.h). Found out by comparing with PyTorch's kernel, once a process for each distribution and
// dtype, in a few milliseconds. For any thread, in whatever state it is; nothing of the user's is touched.

// By our own kernel, for parameters that it can take (`hasOwnKernel()`).
TORCHEXT_API bool isOwnKernelExact(Distribution distribution, c10::ScalarType dtype);

// By PyTorch's kernel on pieces, cut as in pieces.h. False for dtypes that have no such fills.
TORCHEXT_API bool arePiecesExact(Distribution distribution, c10::ScalarType dtype);

}  // namespace torchext
