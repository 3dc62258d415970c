#pragma once

#include <memory>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

struct Allocation;

// While at least one guard lives on a thread, the allocations and frees of the CPU allocator there are counted with
// the fake tensors on the CPU, for comparisons. PyTorch reports them as it reports to its profiler
// (`reportMemoryUsageToProfiler()`), so the guard and the profiler exclude each other on a thread.
//
// Memory that another thread frees, for example a thread of gloo, is counted until its address is reused.
class TORCHEXT_API RealAllocationsGuard {
 public:
  RealAllocationsGuard();
  C10_DISABLE_COPY_AND_ASSIGN(RealAllocationsGuard);
  ~RealAllocationsGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls `visit` with the counted allocation of a fake or real storage, if one exists, under the lock `kDeviceMemory`,
// so that it is not freed in the meantime.
TORCHEXT_API void visitCountedAllocation(const c10::Storage& storage, c10::function_ref<void(Allocation&)> visit);

}  // namespace torchext
