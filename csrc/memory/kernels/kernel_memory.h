#pragma once

// What CUDA kernels of PyTorch allocate while they run, besides their results: workspaces, buffers for reductions,
// copies of arguments.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torchext/macros.h>

#include "../../fake/cuda/gpu.h"

namespace torchext {

// NOTE [What kernels allocate]
//
// A kernel for CUDA allocates more than its results, from the same allocator: copies of arguments that the library
// cannot read as they are, buffers in which the blocks of a reduction meet, what a sort needs, and cuBLAS's workspace.
// A peak is often within such a call, and the holes that it leaves decide where the next tensors go. So each kernel
// that allocates has a rule, which repeats what it does: what is allocated, in which order, and what is freed when.
//
// The rules come from PyTorch's sources, and from the CUDA build of PyTorch 2.15: test/oracle/record_kernels.py runs
// calls there without a GPU, and test/memory/test_kernel_memory.py compares what it has recorded with what the rules
// say. A kernel without a rule is taken to allocate nothing but its results, in the order in which they are returned.

// One step of a kernel.
struct KernelStep {
  enum class Kind : std::uint8_t {
    kAllocate,   // it allocates a block besides its results
    kFree,       // it frees one that it allocated
    kWorkspace,  // it needs a block that the thread keeps for its stream; allocated when there is none, or a smaller
                 // one
    kResult,     // the result number `block` is allocated
  } kind;
  std::int64_t bytes;  // that it requests, of kAllocate and kWorkspace
  std::int32_t block;  // the number of the block within the call; of kWorkspace, which: a WorkspaceNumber
};

// The blocks that a thread keeps for each device and stream. In PyTorch they belong to the handle of cuBLAS, and each
// thread has its own: a backward pass, which runs on a thread of autograd, needs another than the forward pass.
enum WorkspaceNumber : std::uint8_t { kCublasWorkspace, kCublasLtWorkspace };

// What the kernel of a call allocates besides its results, in order. Blocks that are not freed by a step are freed when
// the kernel returns, in the order of their numbers. Results that no step names are allocated between the two lists, in
// the order in which the operator returns them.
struct KernelMemory {
  c10::SmallVector<KernelStep, 2> before_results;
  c10::SmallVector<KernelStep, 2> after_results;

  bool isEmpty() const noexcept {
    return before_results.empty() && after_results.empty();
  }
};

// Returns true if calls of `op` may allocate besides their results. Quick.
TORCHEXT_API bool hasKernelMemory(const c10::OperatorHandle& op);

// Returns what the kernel for a call with these metadata allocates on `gpu`.
TORCHEXT_API KernelMemory kernelMemoryOf(const c10::OperatorHandle& op,
                                         c10::ArrayRef<c10::IValue> arguments,
                                         c10::ArrayRef<c10::IValue> results,
                                         const GpuDescription& gpu);

}  // namespace torchext
