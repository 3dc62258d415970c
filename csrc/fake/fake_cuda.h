#pragma once

#include "../macros.h"

namespace torchext {

// Lets fake tensors name "cuda" as their device on a machine without CUDA devices, where nothing stands behind that
// name: registers a device guard that does nothing, for the rest of the process. Returns true, and does nothing, on a
// machine that has CUDA devices.
TORCHEXT_API bool ensureCudaGuard();

}  // namespace torchext
