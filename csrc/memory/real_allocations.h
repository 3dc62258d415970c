#pragma once

#include <memory>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

struct Allocation;

// While at least one lives on a thread, what PyTorch's allocator of the CPU allocates and frees there is counted with
// the fakes on the CPU, for comparisons. It is told by PyTorch itself, in the way in which it tells its profiler
// (`reportMemoryUsageToProfiler()`), so it cannot be done while PyTorch profiles on the thread, nor the other way
// round.
//
// What another thread frees, such as those of gloo, is counted until its address is used again.
class TORCHEXT_API RealAllocationsGuard {
 public:
  RealAllocationsGuard();
  C10_DISABLE_COPY_AND_ASSIGN(RealAllocationsGuard);
  ~RealAllocationsGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls `visit` with what is counted for the memory of a storage, fake or real, if anything is. It is not freed before
// `visit` returns.
TORCHEXT_API void visitCountedAllocation(const c10::Storage& storage, c10::function_ref<void(Allocation&)> visit);

// For languages without guards: NOTE [Guards and blocks].
TORCHEXT_API void enterRealAllocations();
TORCHEXT_API void leaveRealAllocations();

}  // namespace torchext
