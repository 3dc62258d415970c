#pragma once

#include <memory>

#include <torchext/macros.h>

#include "timeline.h"

namespace torchext {

// Has the storages of fake tensors counted: those on fake CUDA devices always, by the simulated allocator of their
// device, and those on other devices while a tracker is open. To be called once, when the library is loaded.
void registerMemoryCounter();

// Begins to track: the storages of fakes on all devices are counted, until `closeTimeline()`, and the timeline collects
// them, those first that are counted already.
TORCHEXT_API std::shared_ptr<Timeline> openTracker();

}  // namespace torchext
