#pragma once

// The settings in `PYTORCH_ALLOC_CONF` that only a CUDA build of PyTorch parses (`CUDAAllocatorConfig`). c10 parses the
// others in all builds (`AcceleratorAllocatorConfig`).

#include <optional>

#include <torchext/macros.h>

namespace torchext {

struct CudaSettings {
  std::optional<double> memory_fraction;  // `per_process_memory_fraction`, if less than 1
};

// Returns the current settings. Throws c10::ValueError for a setting that PyTorch does not define, as a CUDA build does
// at its first tensor, and for the backend `cudaMallocAsync`, which is not simulated.
TORCHEXT_API CudaSettings cudaSettings();

}  // namespace torchext
