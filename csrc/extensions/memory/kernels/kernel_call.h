#pragma once

// The rules of `kernel_memory` describe a kernel as a list of its allocations and frees.

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "../../../core/support/operator_table.h"
#include "../../../core/support/sizes.h"
#include "../../cuda/gpu.h"
#include "kernel_memory.h"

namespace torchext {

// The call of a described kernel, and its steps so far. Rules follow the kernels line by line, in the order of
// allocation. A rule that does not call `allocateResults()` describes a kernel that allocates all its results last.
class KernelCall {
 public:
  // A block besides the results, or -1: the allocator returns no memory for 0 bytes.
  using BlockNumber = std::int32_t;

  KernelCall(c10::ArrayRef<c10::IValue> of_arguments,
             c10::ArrayRef<c10::IValue> of_results,
             const GpuDescription& on_gpu)
      : arguments(of_arguments), results(of_results), gpu{on_gpu} {}  // braces would make lists of lists

  const c10::ArrayRef<c10::IValue> arguments;
  const c10::ArrayRef<c10::IValue> results;
  const GpuDescription& gpu;

  const c10::IValue& argument(std::size_t i) const {
    return arguments[i];
  }
  const at::Tensor& tensor(std::size_t i) const {
    return arguments[i].toTensor();
  }
  const at::Tensor& result(std::size_t i = 0) const {
    return results[i].toTensor();
  }
  // Returns true if the argument is a defined tensor.
  bool has(std::size_t i) const {
    return arguments[i].isTensor() && arguments[i].toTensor().defined();
  }

  // Allocates the remaining results, in the order in which the operator returns them.
  void allocateResults();
  // Allocates one result, if it has its own storage.
  void allocateResult(std::size_t i);
  void allocateResults(std::initializer_list<std::size_t> in_order);

  BlockNumber allocate(std::int64_t bytes);
  void free(BlockNumber block);
  // Frees the blocks in this order.
  void free(std::initializer_list<BlockNumber> blocks);
  // Allocates a block and frees it at once.
  void allocateAndFree(std::int64_t bytes);
  // Requires memory that the thread keeps for its stream once it has been allocated.
  void keepWorkspace(std::int32_t workspace, std::int64_t bytes);

  // Allocates a copy of the tensor, with all its elements.
  BlockNumber copy(const at::Tensor& tensor) {
    return allocate(bytesOf(tensor));
  }
  BlockNumber copyUnlessContiguous(const at::Tensor& tensor) {
    return tensor.is_contiguous() ? -1 : copy(tensor);
  }
  static std::int64_t bytesOf(const at::Tensor& tensor) {
    return tensor.numel() * toSigned(tensor.element_size());
  }

  KernelMemory take() {
    return std::move(memory_);
  }

 private:
  void add(KernelStep step);

  KernelMemory memory_;
  bool has_results_ = false;
  BlockNumber next_ = 0;
};

// Describes the kernel of a call by adding its steps.
using KernelRule = void (*)(KernelCall& call);

// Registers rules and their operators. The file of each kind of kernels defines one.
struct KernelRules {
  KernelRules(std::initializer_list<OperatorTable<KernelRule>::Group> rules);  // NOLINT(google-explicit-constructor)
};

}  // namespace torchext
