#pragma once

#include <cstddef>
#include <optional>

#include <c10/core/Device.h>

namespace torchext {

// Why a request could not be met, in bytes.
struct OutOfMemory {
  c10::DeviceIndex device;
  std::size_t requested;  // of the driver
  std::size_t capacity;
  std::size_t free;
  std::optional<std::size_t> allowed;  // by `torch.cuda.set_per_process_memory_fraction()`
  std::size_t allocated;
  std::size_t reserved;
};

// Raises `torch.OutOfMemoryError` with the words of CUDACachingAllocator.cpp, and where the memory is if that is
// tracked.
[[noreturn]] void raise(const OutOfMemory& report);

}  // namespace torchext
