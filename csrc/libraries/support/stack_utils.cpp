#include "stack_utils.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

namespace torchext {

namespace {

IValue mapList(const IValue& value, TensorMapper map) {
  c10::List<IValue> source = value.toList();
  c10::impl::GenericList mapped(source.elementType());
  mapped.reserve(source.size());
  for (const auto i : c10::irange(source.size())) {
    mapped.push_back(mapTensors(source.get(i), map));
  }
  return mapped;
}

IValue mapTuple(const IValue& value, TensorMapper map) {
  std::vector<IValue> mapped;
  for (const IValue& element : value.toTupleRef().elements()) {
    mapped.push_back(mapTensors(element, map));
  }
  return c10::ivalue::Tuple::create(std::move(mapped));
}

IValue mapDict(const IValue& value, TensorMapper map) {
  auto source = value.toGenericDict();
  c10::impl::GenericDict mapped(source.keyType(), source.valueType());
  for (const auto& entry : source) {
    mapped.insert(entry.key(), mapTensors(entry.value(), map));
  }
  return mapped;
}

}  // namespace

void forEachTensor(const IValue& value, TensorVisitor visit) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined()) {
      visit(tensor);
    }
  } else if (value.isList()) {
    // Lists of numbers are also lists of IValues. Their element type distinguishes them without a look at each element.
    const auto kind = value.toListRef().empty() ? c10::TypeKind::NoneType : value.toList().elementType()->kind();
    if (kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType || kind == c10::TypeKind::BoolType ||
        kind == c10::TypeKind::NoneType) {
      return;
    }
    for (const IValue& element : value.toListRef()) {
      forEachTensor(element, visit);
    }
  } else if (value.isTuple()) {
    for (const IValue& element : value.toTupleRef().elements()) {
      forEachTensor(element, visit);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      forEachTensor(entry.value(), visit);
    }
  }
}

void forEachTensor(ArrayRef<IValue> values, TensorVisitor visit) {
  for (const IValue& value : values) {
    forEachTensor(value, visit);
  }
}

void forEachWritten(const c10::FunctionSchema& schema,
                    ArrayRef<IValue> arguments,
                    c10::function_ref<void(const Tensor& tensor, std::size_t position)> visit) {
  for (const auto i : c10::irange(schema.is_mutable() ? arguments.size() : 0)) {
    if (isWritten(schema.arguments()[i])) {
      forEachTensor(arguments[i], [&](const Tensor& tensor) { visit(tensor, i); });
    }
  }
}

bool hasTensor(const IValue& value, TensorPredicate is_wanted) {
  return hasTensor(ArrayRef<IValue>(value), is_wanted);  // braces would copy it
}

bool hasTensor(ArrayRef<IValue> values, TensorPredicate is_wanted) {
  bool has_any = false;
  forEachTensor(values, [&](const Tensor& tensor) { has_any = has_any || is_wanted(tensor); });
  return has_any;
}

bool allTensors(ArrayRef<IValue> values, TensorPredicate is_wanted) {
  return !hasTensor(values, [is_wanted](const Tensor& tensor) { return !is_wanted(tensor); });
}

IValue mapTensors(const IValue& value, TensorMapper map) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(map(tensor)) : value;
  }
  if (!hasTensor(value, [](const Tensor&) { return true; })) {
    return value;
  }
  if (value.isList()) {
    return mapList(value, map);
  }
  if (value.isTuple()) {
    return mapTuple(value, map);
  }
  return mapDict(value, map);
}

void mapTensors(Stack& stack, std::size_t count, TensorMapper map) {
  for (auto position = stack.end() - static_cast<std::ptrdiff_t>(count); position != stack.end(); ++position) {
    if (!position->isNone()) {
      *position = mapTensors(*position, map);
    }
  }
}

ArrayRef<IValue> argumentsOf(const OperatorHandle& op, const Stack& stack) {
  return topOf(stack, op.schema().arguments().size());
}

const IValue& argumentNamed(const OperatorHandle& op, ArrayRef<IValue> arguments, const char* name) {
  static const IValue none;
  const int position = findArgument(op.schema(), name);
  return position < 0 ? none : arguments[toSize(position)];
}

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool isOfTensors(const c10::Argument& value) {
  return value.type()->isSubtypeOf(*c10::TensorType::get()) || value.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

WrittenTensors::WrittenTensors(const c10::FunctionSchema& schema, ArrayRef<IValue> arguments) {
  forEachWritten(schema, arguments, [this](const Tensor& tensor, std::size_t /*position*/) {
    if (tensor.has_storage()) {
      entries_.push_back(
          {tensor, c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.storage().nbytes()});
    }
  });
}

void WrittenTensors::appendChanged(Stack& stack) const {
  for (const Entry& entry : entries_) {
    const bool is_same = entry.tensor.sizes() == c10::IntArrayRef(entry.sizes) &&
                         entry.tensor.strides() == c10::IntArrayRef(entry.strides) &&
                         entry.tensor.storage().nbytes() == entry.nbytes;
    stack.push_back(is_same ? IValue{} : IValue{entry.tensor});
  }
}

void WrittenTensors::restoreGeometry() const {
  for (const Entry& entry : entries_) {
    entry.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(entry.sizes, entry.strides);
  }
}

}  // namespace torchext
