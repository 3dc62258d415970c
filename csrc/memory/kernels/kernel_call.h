#pragma once

// How the rules of `kernel_memory` describe a kernel: as the list of what it allocates and frees.

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "../../fake/cuda/gpu.h"
#include "../../support/operator_table.h"
#include "kernel_memory.h"

namespace torchext {

// A call whose kernel is described, and what is known of it so far. The rules follow the kernels line by line: what a
// rule calls first is allocated first. A rule that does not call `allocateResults()` describes a kernel that has all
// its results allocated last.
class KernelCall {
 public:
  // A block besides the results. One of 0 bytes is none: the allocator gives no memory for it.
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
  // Returns true if the argument is a tensor that is defined.
  bool has(std::size_t i) const {
    return arguments[i].isTensor() && arguments[i].toTensor().defined();
  }

  // All results that have not been allocated yet are allocated, in the order in which the operator returns them.
  void allocateResults();
  // The result is allocated, if it is on a storage of its own.
  void allocateResult(std::size_t i);
  void allocateResults(std::initializer_list<std::size_t> in_order);

  BlockNumber allocate(std::int64_t bytes);
  void free(BlockNumber block);
  // The blocks are freed in this order.
  void free(std::initializer_list<BlockNumber> blocks);
  // A block that is only needed for a moment.
  void allocateAndFree(std::int64_t bytes);
  // Memory that the thread keeps for its stream, once it has been needed.
  void keepWorkspace(std::int32_t workspace, std::int64_t bytes);

  // A copy of the tensor, with all its elements.
  BlockNumber copy(const at::Tensor& tensor) {
    return allocate(bytesOf(tensor));
  }
  BlockNumber copyUnlessContiguous(const at::Tensor& tensor) {
    return tensor.is_contiguous() ? -1 : copy(tensor);
  }
  static std::int64_t bytesOf(const at::Tensor& tensor) {
    return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
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

// Describes the kernel of a call.
using KernelRule = void (*)(KernelCall& call);

// Rules, and the operators that each is for. Each kind of kernels has them in its file.
struct KernelRules {
  KernelRules(std::initializer_list<OperatorTable<KernelRule>::Group> rules);  // NOLINT(google-explicit-constructor)
};

}  // namespace torchext
