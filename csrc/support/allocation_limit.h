#pragma once

#include <cstddef>
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

#include "no_observers.h"

namespace torchext {

// While it lives, a request for more than `max_bytes` at once to PyTorch's allocator of the CPU raises std::bad_alloc
// on this thread, before the memory is touched. Kernels check their arguments before they allocate results, so this
// shows what they refuse without computing what they accept.
//
// It takes the place of a profiler, because the allocator reports to a profiler only. A profiler of the user's does not
// see what happens on this thread then: it would take what is in its place for its own state.
class AllocationLimit {
 public:
  explicit AllocationLimit(std::size_t max_bytes);

 private:
  NoObservers no_observers_;
  std::shared_ptr<c10::DebugInfoBase> reporter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace torchext
