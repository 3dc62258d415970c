#pragma once

// The settings in `PYTORCH_ALLOC_CONF` that only a CUDA build of PyTorch parses (`CUDAAllocatorConfig`). The others are
// parsed by c10 in all builds (`AcceleratorAllocatorConfig`).

#include <optional>

#include <torchext/macros.h>

namespace torchext {

struct CudaSettings {
  std::optional<double> memory_fraction;  // `per_process_memory_fraction`, if it limits anything
};

// Returns those that are in force. Throws c10::ValueError for a setting that PyTorch does not know, as a CUDA build
// does when it comes to its first tensor, and for the backend `cudaMallocAsync`, which is not simulated.
TORCHEXT_API CudaSettings cudaSettings();

}  // namespace torchext
