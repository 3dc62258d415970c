#pragma once

// The memory that PyTorch's CUDA kernels allocate besides their results: workspaces, buffers for reductions, copies of
// arguments. The rules are in the language of the program: NOTE [Allocations of kernels],
// torchext/memory/kernels/__init__.py.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torchext/macros.h>

#include "../cuda/fake_cuda.h"

namespace torchext {

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

// Returns the steps of the kernel for a call with these metadata on `gpu`.
using KernelRules = KernelMemory (*)(const c10::OperatorHandle& op,
                                     c10::ArrayRef<c10::IValue> arguments,
                                     c10::ArrayRef<c10::IValue> results,
                                     const GpuDescription& gpu);

// Sets the rules of `operators` (full names), before memory of CUDA devices is counted. Later calls do nothing. Until
// then, as in programs written in C++ only, kernels allocate only their results.
TORCHEXT_API void setKernelRules(const std::vector<std::string>& operators, KernelRules rules);

// Returns true if calls of `op` may allocate besides their results. Costs one table lookup.
bool hasKernelMemory(const c10::OperatorHandle& op);

// Applies the rule of `op`, which must have one. Needs the interpreter. Throws what the rule raises, without effects.
KernelMemory kernelMemoryOf(const c10::OperatorHandle& op,
                            c10::ArrayRef<c10::IValue> arguments,
                            c10::ArrayRef<c10::IValue> results,
                            const GpuDescription& gpu);

}  // namespace torchext
