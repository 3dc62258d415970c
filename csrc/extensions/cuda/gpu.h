#pragma once

#include <cstdint>
#include <string>

#include <torchext/macros.h>

namespace torchext {

// Describes a fake CUDA device. The defaults are those of `fake_mode(gpu=True)`: the latest generation that all
// supported PyTorch releases have kernels for.
struct GpuDescription {
  std::string name = "torchext fake CUDA device";
  std::int64_t total_memory = std::int64_t{80} << 30;  // in bytes, as the driver reports it
  // Whether the memory can run out. Unless the user describes the devices, a model of any size fits.
  bool is_limited = false;
  std::int64_t context_memory = 0;  // in bytes; unavailable to the process
  int major = 9;
  int minor = 0;
  int multiprocessors = 132;
  int max_threads_per_multiprocessor = 2048;
  std::int64_t shared_memory_per_block_optin = 232448;  // in bytes
  std::int64_t l2_cache = std::int64_t{50} << 20;       // in bytes

  bool isAtLeast(int wanted_major, int wanted_minor) const noexcept {
    return major > wanted_major || (major == wanted_major && minor >= wanted_minor);
  }
};

}  // namespace torchext
