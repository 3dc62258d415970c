#pragma once

// What CUDA kernels of PyTorch allocate while they run, besides their results: workspaces, buffers for reductions,
// copies of arguments.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "../fake/cuda/gpu.h"

namespace torchext {

// One step of a kernel: it allocates a block besides its results, or frees one that it allocated.
struct KernelStep {
  enum class Kind : std::uint8_t { kAllocate, kFree, kWorkspace } kind;
  std::int64_t bytes;  // that it requests, of kAllocate and kWorkspace
  std::int32_t block;  // the number of the block within the call
};

// What the kernel of a call allocates besides its results, in order. Blocks that are not freed by a step are freed when
// the kernel returns, in the order of their numbers.
struct KernelMemory {
  c10::SmallVector<KernelStep, 2> before_results;
  c10::SmallVector<KernelStep, 2> after_results;

  bool isEmpty() const noexcept {
    return before_results.empty() && after_results.empty();
  }
};

// Returns true if calls of `op` may allocate besides their results. Quick.
bool hasKernelMemory(const c10::OperatorHandle& op);

// Returns what the kernel for a call with these metadata allocates on `gpu`.
KernelMemory kernelMemoryOf(const c10::OperatorHandle& op,
                            c10::ArrayRef<c10::IValue> arguments,
                            c10::ArrayRef<c10::IValue> results,
                            const GpuDescription& gpu);

}  // namespace torchext
