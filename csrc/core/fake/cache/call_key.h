#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include "../../../libraries/support/pointer_numbers.h"

namespace torchext {

// The distinct tensors among the arguments of a call, in order.
using CallTensors = c10::ArrayRef<const at::Tensor*>;
using DistinctTensors = c10::SmallVector<const at::Tensor*, 8>;

// Returns them. The pointers refer to `arguments`.
DistinctTensors distinctTensors(c10::ArrayRef<c10::IValue> arguments);

// NOTE [Inputs of the metadata of results]
//
// The results of a Meta kernel depend on
//
//   * the kernel. It may change whenever a library is loaded or unloaded. The CPU kernel counts as well, because
//     trials run it: NOTE [Errors of real tensors];
//   * tensor arguments: whether they are fake or a wrapped number, dtype, device, sizes, strides, offset, lazy bits,
//     the size of the storage, and which arguments are the same tensor or share a storage. For a wrapped number, its
//     value also counts;
//   * the other arguments. For a generator, only the device counts: a generator of another device is refused. Ordinary
//     floating-point numbers do not count for some operators, such as those of optimizers, whose numbers change in each
//     step;
//   * except for views and changes of metadata, settings of the process and the thread: default dtype, grad and
//     inference mode, deterministic algorithms, enabled libraries, the order of attention backends, whether there are
//     several threads, the fake devices, whether their memory is counted, and whether deferred_init records the call.
//
// A kernel that belongs to neither PyTorch nor torchext may depend on anything, so no recipe is made of its calls
// (`hasPureKernels()`).
//
// A CallKey encodes all of that as one sequence of words. If two calls have equal keys, their results have equal
// metadata and alias the same arguments.
class CallKey {
 public:
  using Words = c10::SmallVector<std::uint64_t, 64>;

  // Describes a call of `op` with the arguments on top of `stack`.
  CallKey(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // Properties of an operator that never change.
  struct Traits {
    explicit Traits(const c10::OperatorHandle& op);

    bool may_have_pure_kernels;
    bool has_free_numbers;
    bool ignores_settings;
  };

  // Describes the same call by its unboxed arguments, in the same words.
  template <typename... Arguments>
  CallKey(const c10::OperatorHandle& op, Traits traits, const Arguments&... arguments) : traits_{traits} {
    addOperator(op);
    (addUnboxed(arguments), ...);
  }

  // Returns false if the namespace of the operator is neither PyTorch's nor torchext's, or if an argument cannot be
  // described in words: a storage, a symbolic number, or a tensor with more than a strided storage (a subclass, a
  // wrapper of functorch, zeros without memory). Such a key must not be used.
  bool isComplete() const noexcept {
    return is_complete_;
  }

  const Words& words() const noexcept {
    return words_;
  }

  std::size_t hash() const noexcept;

  // Returns `distinctTensors()` of the stack, if the key is complete.
  CallTensors tensors() const noexcept {
    return tensors_;
  }

  // Returns the number of fakes among them.
  std::size_t numFakes() const noexcept {
    return num_fakes_;
  }

 private:
  // Values that an IValue holds without allocating memory are boxed.
  template <typename Value>
  void addUnboxed(const Value& value) {
    add(c10::IValue(value));
  }
  template <typename Value>
  void addUnboxed(const std::optional<Value>& value) {
    value.has_value() ? addUnboxed(*value) : add(c10::IValue{});
  }
  template <typename Element>
  void addUnboxed(const c10::ArrayRef<Element>& elements) {
    addElements(elements);
  }
  template <typename Element>
  void addUnboxed(const c10::OptionalArrayRef<Element>& elements) {
    elements.has_value() ? addElements(*elements) : add(c10::IValue{});
  }
  void addUnboxed(const at::ITensorListRef& tensors) {
    addElements(tensors);
  }
  void addUnboxed(const at::Tensor& tensor) {
    addTensor(tensor);
  }
  void addUnboxed(c10::string_view text) {
    addString(text);
  }
  template <typename Elements>
  void addElements(const Elements& elements) {
    addListOf(elements.size());
    for (const auto& element : elements) {
      addUnboxed(element);
    }
  }

  std::uint64_t* grow(std::size_t count) {
    const std::size_t size = words_.size();
    words_.resize_for_overwrite(size + count);
    return words_.data() + size;
  }

  void addListOf(std::size_t count);
  void addOperator(const c10::OperatorHandle& op);
  void addGlobalState();
  void add(const c10::IValue& value);
  void addDouble(double number);
  void addTensor(const at::Tensor& tensor);
  void addNumberOf(const at::Tensor& wrapped_number);
  void addString(std::string_view text);

  const Traits traits_;
  Words words_;
  DistinctTensors tensors_;
  PointerNumbers tensor_numbers_;
  PointerNumbers storage_numbers_;
  std::size_t num_fakes_ = 0;
  bool is_complete_ = false;
};

// Returns true if the results of `op` depend only on what the key contains: PyTorch or torchext provides all kernels
// that compute them.
bool hasPureKernels(const c10::OperatorHandle& op);

// Copies of the kernels whose addresses are in the keys for calls of `op`.
using CallKernels = std::array<c10::KernelFunction, 2>;
CallKernels kernelsOf(const c10::OperatorHandle& op);

// Returns true if `kernels`, which were those of `op`, still are.
bool areUnchanged(const CallKernels& kernels, const c10::OperatorHandle& op);

// Returns true for a fake that a key describes, except for its sizes, by its storage and dtype.
bool isPlainFake(const at::Tensor& tensor);

}  // namespace torchext
