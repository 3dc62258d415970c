#include "stack_utils.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

namespace torchext {

namespace {

bool holdsTensor(const IValue& value) {
  return hasTensor(value, [](const at::Tensor&) { return true; });
}

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
    const at::Tensor& tensor = value.toTensor();
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

void forEachTensor(c10::ArrayRef<IValue> values, TensorVisitor visit) {
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
  return hasTensor(c10::ArrayRef<IValue>(value), is_wanted);  // braces would copy it
}

bool hasTensor(c10::ArrayRef<IValue> values, TensorPredicate is_wanted) {
  bool has_any = false;
  forEachTensor(values, [&](const at::Tensor& tensor) { has_any = has_any || is_wanted(tensor); });
  return has_any;
}

bool allTensors(c10::ArrayRef<IValue> values, TensorPredicate is_wanted) {
  return !hasTensor(values, [is_wanted](const at::Tensor& tensor) { return !is_wanted(tensor); });
}

IValue mapTensors(const IValue& value, TensorMapper map) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(map(tensor)) : value;
  }
  if (!holdsTensor(value)) {
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

int findArgument(const c10::FunctionSchema& schema, const char* name) {
  const auto& arguments = schema.arguments();
  const auto found =
      std::find_if(arguments.begin(), arguments.end(), [name](const c10::Argument& a) { return a.name() == name; });
  return found == arguments.end() ? -1 : static_cast<int>(found - arguments.begin());
}

ArrayRef<IValue> argumentsOf(const OperatorHandle& op, const Stack& stack) {
  return topOf(stack, op.schema().arguments().size());
}

const IValue& argumentNamed(const OperatorHandle& op, ArrayRef<IValue> arguments, const char* name) {
  static const IValue none;
  const int position = findArgument(op.schema(), name);
  return position < 0 ? none : arguments[toSize(position)];
}

std::string_view namespaceOf(const c10::OperatorName& name) {
  return std::string_view{name.name}.substr(0, name.name.find("::"));
}

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool isOfTensors(const c10::Argument& value) {
  return value.type()->isSubtypeOf(*c10::TensorType::get()) || value.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

}  // namespace torchext
