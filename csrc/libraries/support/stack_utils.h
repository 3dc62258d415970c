#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "sizes.h"

namespace c10 {
class OperatorHandle;
}

namespace torchext {

// The names of PyTorch in functions on boxed calls.
using at::Tensor;
using c10::ArrayRef;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

using TensorVisitor = c10::function_ref<void(const Tensor&)>;
using TensorPredicate = c10::function_ref<bool(const Tensor&)>;
using TensorMapper = c10::function_ref<Tensor(const Tensor&)>;

// Returns the last `count` values of `stack`.
inline ArrayRef<IValue> topOf(const Stack& stack, std::size_t count) {
  return ArrayRef<IValue>(stack).slice(stack.size() - count);
}

// Replaces the last `count` values of `stack`.
template <typename Values>
void replaceTop(Stack& stack, std::size_t count, Values values) {
  torch::jit::drop(stack, count);
  std::move(values.begin(), values.end(), std::back_inserter(stack));
}

// Returns the arguments of a call of `op`, which are on top of `stack`.
TORCHEXT_API ArrayRef<IValue> argumentsOf(const OperatorHandle& op, const Stack& stack);

// Returns the argument called `name` of a call, or None if the schema has none.
const IValue& argumentNamed(const OperatorHandle& op, ArrayRef<IValue> arguments, const char* name);

// Calls `visit` for each defined tensor in `value`, in order: plain tensors, lists of tensors, lists of optional
// tensors, tuples and dictionaries of those.
void forEachTensor(const IValue& value, TensorVisitor visit);

// The same for several values.
void forEachTensor(ArrayRef<IValue> values, TensorVisitor visit);

// Calls `visit` for each tensor that a call with these arguments writes by its schema, with the position of the
// argument.
void forEachWritten(const c10::FunctionSchema& schema,
                    ArrayRef<IValue> arguments,
                    c10::function_ref<void(const Tensor& tensor, std::size_t position)> visit);

// Returns true if `is_wanted` returns true for one of the defined tensors in `value`, or in `values`.
bool hasTensor(const IValue& value, TensorPredicate is_wanted);
TORCHEXT_API bool hasTensor(ArrayRef<IValue> values, TensorPredicate is_wanted);

// Returns true if `is_wanted` returns true for all defined tensors in `values`.
bool allTensors(ArrayRef<IValue> values, TensorPredicate is_wanted);

// Returns `value` with each defined tensor replaced by the tensor that `map` returns for it. Compound values that hold
// tensors are rebuilt, never changed in place, since the operator's caller may also hold them.
IValue mapTensors(const IValue& value, TensorMapper map);

// The same for the last `count` values of `stack`, in place.
TORCHEXT_API void mapTensors(Stack& stack, std::size_t count, TensorMapper map);

// Returns the position in the schema of the argument called `name`, or -1.
inline int findArgument(const c10::FunctionSchema& schema, const char* name) {
  return schema.argumentIndexWithName(name).value_or(-1);
}

// Returns true if `name` is one of `names`.
template <std::size_t N>
bool isAmong(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Returns the part of an operator's name before the `::`, such as `aten`.
inline std::string_view namespaceOf(const c10::OperatorName& name) {
  return name.getNamespace().value_or(name.name);
}

// Returns true if the schema declares that the operator writes to the argument.
bool isWritten(const c10::Argument& argument);

// Returns true if an argument or a result is declared as a tensor or a list of tensors.
bool isOfTensors(const c10::Argument& value);

// The tensors that a call writes according to its schema, in order, as they were before the call. Tensors without a
// storage are left out.
class WrittenTensors {
 public:
  WrittenTensors(const c10::FunctionSchema& schema, ArrayRef<IValue> arguments);

  // Appends each of them if its sizes, strides or storage size have changed, and None in its place otherwise.
  void appendChanged(Stack& stack) const;

  // Gives each of them its sizes and strides back, but not its offset, and not the size of its storage.
  void restoreGeometry() const;

 private:
  struct Entry {
    Tensor tensor;
    c10::DimVector sizes;
    c10::DimVector strides;
    std::size_t nbytes;
  };
  std::vector<Entry> entries_;
};

}  // namespace torchext
