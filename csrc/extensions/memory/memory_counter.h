#pragma once

#include <memory>

#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "timeline.h"

namespace torchext {

// NOTE [Categories of memory]
//
// Modules and optimizers identify parameters, gradients and optimizer states. The memory of a training engine is
// classified by the calls that use it, independent of the engine:
//
// - A flat argument or result of a collective is communication: a bucket, not an activation.
// - Memory made outside of modules that a backward pass adds to holds gradients. Memory that a backward pass overwrites
//   is presumed to hold gradients, unless it is communicated.
// - With gradients off, a result of a forward pass that a later pass of the same module reads is a cache. A `cat` with
//   it is also a cache. So is a buffer, or memory made outside of modules, that a forward pass writes in part, as keys
//   and values are written at their positions.
//
// All other memory keeps the category of its allocation.

// Starts counting the storages of fake tensors: on fake CUDA devices and in pinned memory always, by simulated
// allocators; on other devices while a tracker is open. Call it once, when the library is loaded.
void registerMemoryCounter();

// Sets the category of `storage`, unless it has one that comes later in `MemoryCategory`. Counts the storage if it is
// fake and not yet counted.
TORCHEXT_API void markStorage(const c10::Storage& storage, MemoryCategory category);

// Starts tracking: until `closeTimeline()`, fake storages on all devices are counted and recorded in the timeline.
// Storages that are already counted are added first.
TORCHEXT_API std::shared_ptr<Timeline> openTracker();

}  // namespace torchext
