#pragma once

#include <memory>

#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "timeline.h"

namespace torchext {

// NOTE [What memory is for]
//
// Parameters, gradients and states of optimizers are found where modules and optimizers have them. What engines
// allocate for themselves is known by what calls do with it, whatever the engine is called:
//
//   * what a collective is given or gives is communication, if it is flat: a bucket, not an activation;
//   * what was made outside of modules, and is added to in a backward pass, holds gradients. What is overwritten there
//     is presumed to hold some, unless it is communicated;
//   * where gradients are off, what a forward pass has made, and a later pass of the same module reads, is a cache, and
//     so is what is made by `cat` of it; so is what was made outside of modules, or is a buffer of one, and is written
//     in part by a forward pass, as keys and values are at their positions.
//
// All other memory keeps the category that it had when it was allocated.

// Has the storages of fake tensors counted: those on fake CUDA devices always, by the simulated allocator of their
// device, and those on other devices while a tracker is open. To be called once, when the library is loaded.
void registerMemoryCounter();

// What `storage` is for, unless it is known to be for something that comes later in `MemoryCategory`. It is counted if
// it is fake and was not.
TORCHEXT_API void markStorage(const c10::Storage& storage, MemoryCategory category);

// Begins to track: the storages of fakes on all devices are counted, until `closeTimeline()`, and the timeline collects
// them, those first that are counted already.
TORCHEXT_API std::shared_ptr<Timeline> openTracker();

}  // namespace torchext
