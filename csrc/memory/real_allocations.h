#pragma once

#include <memory>

#include <torchext/macros.h>

namespace torchext {

// While at least one lives on a thread, what PyTorch's allocator of the CPU allocates and frees there is counted with
// the fakes on the CPU, for comparisons. It is told by PyTorch itself, in the way in which it tells its profiler
// (`reportMemoryUsageToProfiler()`); while the profiler of PyTorch records memory on the thread, that is told alone.
class TORCHEXT_API RealAllocationsGuard {
 public:
  RealAllocationsGuard();
  RealAllocationsGuard(const RealAllocationsGuard&) = delete;
  RealAllocationsGuard& operator=(const RealAllocationsGuard&) = delete;
  RealAllocationsGuard(RealAllocationsGuard&&) = delete;
  RealAllocationsGuard& operator=(RealAllocationsGuard&&) = delete;
  ~RealAllocationsGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// For languages without guards: NOTE [Guards and blocks].
TORCHEXT_API void enterRealAllocations();
TORCHEXT_API void leaveRealAllocations();

}  // namespace torchext
