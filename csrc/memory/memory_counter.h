#pragma once

#include <torchext/macros.h>

namespace torchext {

// Has the storages of fake tensors counted: those on fake CUDA devices always, by the simulated allocator of their
// device, and those on other devices while a tracker is open. To be called once, when the library is loaded.
void registerMemoryCounter();

// Begins and ends to track: the storages of fakes on all devices are counted, and the timeline collects.
TORCHEXT_API std::int64_t openTracker();
TORCHEXT_API void closeTracker();

}  // namespace torchext
