#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "pointer_numbers.h"

namespace torchext {

// NOTE [What the metadata of results depend on]
//
// A Meta kernel is a function of
//
//   * the kernel itself, which may change at any time, when a library is loaded or unloaded. The kernel of the CPU
//     counts as well, because NOTE [Refusing what real tensors refuse] corrects results by it;
//   * its tensor arguments: dtype, device, sizes, strides, offset, lazy bits, the size of the storage, and which of
//     them are the same tensor or share a storage; for a wrapped number, its value, too;
//   * its other arguments; of a generator, its device, because a generator of another device is refused;
//   * if the kernel is neither PyTorch's nor ours, anything: no key describes a call of it;
//   * settings of the process and the thread: default dtype, grad and inference mode, deterministic algorithms, which
//     libraries may be used, how many fake devices there are, whether their memory is counted, and whether
//     deferred_init records the call.
//
// A CallKey is all of that, as one sequence of words. The results of two calls with equal keys have equal metadata, and
// alias the same arguments.
class CallKey {
 public:
  using Words = c10::SmallVector<std::uint64_t, 64>;

  // Describes a call of `op` with the arguments on top of `stack`.
  CallKey(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // Returns false if the operator is neither PyTorch's nor ours, or if the call has an argument that cannot be
  // described in words (a storage, a symbolic number, a tensor that is not strided). Such a key must not be used.
  bool isComplete() const noexcept {
    return is_complete_;
  }

  const Words& words() const noexcept {
    return words_;
  }

  std::size_t hash() const noexcept;

  // Returns the tensors among the arguments, in order and each once. The pointers are to those on the stack.
  c10::ArrayRef<const at::Tensor*> tensors() const noexcept {
    return tensors_;
  }

 private:
  void addOperator(const c10::OperatorHandle& op);
  void addGlobalState();
  void add(const c10::IValue& value);
  void addTensor(const at::Tensor& tensor);
  void addNumberOf(const at::Tensor& wrapped_number);
  void addString(const std::string& text);

  Words words_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  PointerNumbers tensor_numbers_;
  PointerNumbers storage_numbers_;
  bool is_complete_ = true;
};

// Returns true if results of `op` depend on nothing but what is in the key: the kernels that compute them are PyTorch's
// own, or ours.
bool hasPureKernels(const c10::OperatorHandle& op);

// Copies of the kernels whose addresses are in the keys of calls of `op`.
using CallKernels = std::array<c10::KernelFunction, 2>;
CallKernels kernelsOf(const c10::OperatorHandle& op);

}  // namespace torchext
