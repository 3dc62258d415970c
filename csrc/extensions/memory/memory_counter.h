#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torchext/macros.h>

#include "../cuda/fake_cuda.h"
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

// ---- Real tensors ----

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
  std::shared_ptr<c10::DebugInfoBase> reporter_;
  c10::DebugInfoGuard guard_;
};

// Calls `visit` with the counted allocation of a fake or real storage, if one exists, under the lock `kDeviceMemory`,
// so that it is not freed in the meantime.
TORCHEXT_API void visitCountedAllocation(const c10::Storage& storage, c10::function_ref<void(Allocation&)> visit);

// ---- Kernels ----
//
// The memory that PyTorch's CUDA kernels allocate besides their results: workspaces, buffers for reductions, copies of
// arguments. The rules are in the language of the program: NOTE [Allocations of kernels],
// torchext/fake/cuda/kernels/__init__.py.

// One step of a kernel.
struct KernelStep {
  enum class Kind : std::uint8_t {
    kAllocate,   // allocate a block besides the results
    kFree,       // free such a block
    kWorkspace,  // require a block that the thread keeps for its stream; allocated if missing or too small
    kResult,     // allocate the result number `block`
  } kind;
  std::int64_t bytes;  // requested by kAllocate and kWorkspace
  std::int32_t block;  // the number of the block in the call; a WorkspaceNumber for kWorkspace
};

// The steps of the kernel of a call, in order. Blocks that no step frees are freed when the kernel returns, in the
// order of their numbers. Results that no step names are allocated between the two lists, in the order in which the
// operator returns them.
struct KernelMemory {
  c10::SmallVector<KernelStep, 2> before_results;
  c10::SmallVector<KernelStep, 2> after_results;

  bool isEmpty() const noexcept {
    return before_results.empty() && after_results.empty();
  }
};

// Returns the steps of the kernel for a call with these metadata on `gpu`. Needs the interpreter. Throws what the rule
// raises, without effects.
using KernelRules = KernelMemory (*)(const c10::OperatorHandle& op,
                                     c10::ArrayRef<c10::IValue> arguments,
                                     c10::ArrayRef<c10::IValue> results,
                                     const GpuDescription& gpu);

// Sets the rules of `operators` (full names), before memory of CUDA devices is counted. Later calls do nothing. Until
// then, as in programs written in C++ only, kernels allocate only their results.
TORCHEXT_API void setKernelRules(const std::vector<std::string>& operators, KernelRules rules);

}  // namespace torchext
