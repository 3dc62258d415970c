#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// Why a request failed, in bytes.
struct OutOfMemory {
  c10::DeviceIndex device;
  std::size_t requested;  // from the driver
  std::size_t capacity;
  std::size_t free;
  std::optional<std::size_t> allowed;  // by `torch.cuda.set_per_process_memory_fraction()`
  std::size_t allocated;
  std::size_t reserved;
};

// Calls `observer` before each error from now on, on the thread that raises it, without locks.
TORCHEXT_API void addOutOfMemoryObserver(std::function<void(const OutOfMemory&)> observer);
TORCHEXT_API void forgetOutOfMemoryObservers();

// Raises `torch.OutOfMemoryError` with the text of CUDACachingAllocator.cpp and, if memory is tracked, the bytes of
// each category.
[[noreturn]] void raise(const OutOfMemory& report);

}  // namespace torchext
