#pragma once

#include "../macros.h"

namespace torchext {

// Lets fake tensors name "cuda" as their device on a build of PyTorch without CUDA, where nothing else stands behind
// that name: registers a device guard that does nothing, for the rest of the process. Returns true, and does nothing,
// on a build with CUDA.
TORCHEXT_API bool ensureCudaGuard();

}  // namespace torchext
