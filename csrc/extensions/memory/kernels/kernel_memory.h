#pragma once

// The memory that PyTorch's CUDA kernels allocate besides their results: workspaces, buffers for reductions, copies of
// arguments.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torchext/macros.h>

#include "../../cuda/gpu.h"

namespace torchext {

// NOTE [Allocations of kernels]
//
// A CUDA kernel allocates more than its results from the same allocator: copies of arguments in a layout that the
// library cannot read, buffers that combine the partial results of a reduction, temporary storage of sorts, and the
// cuBLAS workspace. A peak is often inside such a call, and the freed blocks decide where the next tensors are placed.
// So each kernel that allocates has a rule that repeats its allocations and frees in order.
//
// The rules come from PyTorch's sources and from the CUDA build of PyTorch 2.15: test/oracle/record_kernels.py runs
// calls there without a GPU, and test/memory/test_kernel_memory.py compares its records with the rules. A kernel
// without a rule is assumed to allocate only its results, in the order in which they are returned.

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

// The blocks that a thread keeps for each device and stream. In PyTorch they belong to the cuBLAS handle of the thread:
// a backward pass, which runs on an autograd thread, needs its own.
enum WorkspaceNumber : std::uint8_t { kCublasWorkspace, kCublasLtWorkspace };

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

// Returns true if calls of `op` may allocate besides their results. Costs one table lookup.
TORCHEXT_API bool hasKernelMemory(const c10::OperatorHandle& op);

// Returns the steps of the kernel for a call with these metadata on `gpu`.
TORCHEXT_API KernelMemory kernelMemoryOf(const c10::OperatorHandle& op,
                                         c10::ArrayRef<c10::IValue> arguments,
                                         c10::ArrayRef<c10::IValue> results,
                                         const GpuDescription& gpu);

}  // namespace torchext
