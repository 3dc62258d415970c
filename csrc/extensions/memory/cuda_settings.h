#pragma once

// The settings in `PYTORCH_ALLOC_CONF` that only a CUDA build of PyTorch parses (`CUDAAllocatorConfig`). c10 parses the
// others in all builds (`AcceleratorAllocatorConfig`).

#include <cstddef>
#include <limits>
#include <optional>
#include <string>

#include <torchext/macros.h>

namespace torchext {

struct CudaSettings {
  std::optional<double> memory_fraction;  // `per_process_memory_fraction`, if less than 1
};

// The limits of the allocator of pinned memory, in bytes. Releases before 2.13 have none.
struct PinnedSettings {
  std::size_t most_rounded = std::numeric_limits<std::size_t>::max();  // `pinned_max_round_threshold_mb`
  std::size_t most_cached = std::numeric_limits<std::size_t>::max();   // `pinned_max_cached_size_mb`
};

PinnedSettings pinnedSettings() noexcept;

// Returns the settings in `text`, by default the current ones. Throws c10::ValueError for a setting that PyTorch does
// not define, as a CUDA build does at its first tensor, and for the backend `cudaMallocAsync`, which is not simulated.
TORCHEXT_API CudaSettings cudaSettings(const std::string& text);
TORCHEXT_API CudaSettings cudaSettings();

}  // namespace torchext
