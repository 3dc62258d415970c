#pragma once

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
//   * the kernel itself, which may change at any time, when a library is loaded or unloaded;
//   * its tensor arguments: dtype, device, sizes, strides, offset, lazy bits, the size of the storage, and which of
//     them are the same tensor or share a storage; for a wrapped number, its value, too;
//   * its other arguments;
//   * if the kernel is neither PyTorch's nor ours, anything: no key describes a call of it;
//   * settings of the process and the thread: default dtype, grad and inference mode, deterministic algorithms, which
//     libraries may be used, and how many fake devices there are.
//
// A CallKey is all of that, as one sequence of words. The results of two calls with equal keys have equal metadata, and
// alias the same arguments.
class CallKey {
 public:
  using Words = c10::SmallVector<std::uint64_t, 64>;

  // Describes a call of `op` with the arguments on top of `stack`.
  CallKey(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // Returns false if the operator is neither PyTorch's nor ours, or the call has an argument that cannot be described
  // in words (a storage, a symbolic number, a tensor that is not strided). Such a key must not be used.
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

}  // namespace torchext
