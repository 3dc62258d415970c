#pragma once

#include <cstddef>
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace torchext {

// While it lives, a request for more than `max_bytes` at once to PyTorch's allocator of the CPU raises std::bad_alloc
// on this thread, before the memory is touched. Kernels check their arguments before they allocate results, so this
// shows what they refuse without computing what they accept.
//
// It takes the place of a profiler: PyTorch's allocator reports to nobody else. A profiler of the user's sees none of
// the allocations.
class AllocationLimit {
 public:
  explicit AllocationLimit(std::size_t max_bytes);

 private:
  std::shared_ptr<c10::DebugInfoBase> reporter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace torchext
