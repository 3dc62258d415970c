#include "known_values.h"

#include <cstddef>
#include <new>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/torch_internals/dispatcher_internals.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/allocation_limit.h"

namespace torchext {

using at::Scalar;

namespace {

// Returns a real tensor with the metadata of an argument whose values are not used. A large argument is replaced by an
// empty one: the result is small, so it does not have the argument's shape.
Tensor standInOf(const Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).device(c10::kCPU);
  return isSmall(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : at::empty({0}, options);
}

// The allocation limit for a call whose results have value-dependent shapes.
constexpr std::size_t kMaxBytesOfResults = std::size_t{256} << 20;

const OperatorSet countsOnlyFloats{"count integers only on CUDA", {"aten::histc"}};

}  // namespace

void writeValue(const Tensor& fake, const Tensor& value) {
  if (const Tensor known = valueOf(fake); known.defined()) {
    const HiddenCalls guard;
    known.copy_(value);
  } else if (coversStorage(fake)) {
    setValue(fake, value, ValueKind::kKnown);
  } else if (canKnowPart(fake) && makePart(fake, ValueKind::kKnown)) {
    const HiddenCalls guard;
    valueOf(fake).copy_(value);
  } else {
    forgetValues(IValue{fake});
  }
}

Stack writtenBy(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const Stack stack(arguments.begin(), arguments.end());
  Stack written;
  for (const auto i : c10::irange(arguments.size())) {
    if (writesArgument(op, stack, i)) {
      written.push_back(arguments[i]);
    }
  }
  return written;
}

Tensor knownValueOf(const Tensor& fake) {
  return isFake(fake) ? valueOf(fake) : Tensor{};
}

bool canRunOnValues(const OperatorHandle& op) {
  return !isRecording() && hasOwnCpuKernel(op) && !op.hasTag(at::Tag::nondeterministic_seeded) && !onlyAllocates(op);
}

bool overwritesUnknown(const OperatorHandle& op, std::size_t position, const Tensor& tensor) {
  return overwritesArgument(op, position) && (coversStorage(tensor) || canKnowPart(tensor));
}

bool areValuesKnown(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  bool known = true;
  if (isFactory(op, arguments)) {
    return known;
  }
  const bool makes_out = op.hasTag(at::Tag::dynamic_output_shape);  // of another size: runOnValues()
  for (const auto i : c10::irange(arguments.size())) {
    if (!makes_out || !op.schema().arguments()[i].is_out()) {
      forEachTensor(arguments[i], [&](const Tensor& tensor) {
        known = known && (valueOf(tensor).defined() || overwritesUnknown(op, i, tensor));
      });
    }
  }
  return known;
}

Stack runOn(const OperatorHandle& op, ArrayRef<IValue> arguments, TensorMapper value_of) {
  const HiddenCalls guard;
  const NoWarnings no_warnings;    // the fake call raises them
  const NoObservers no_observers;  // profilers record the fake call
  const bool is_factory = isFactory(op, arguments);
  Stack stack;
  for (const auto i : c10::irange(arguments.size())) {
    const IValue& argument = arguments[i];
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device{c10::kCPU});
    } else if (takesTensorOptions(op.schema()) && op.schema().arguments()[i].name() == "pin_memory") {
      stack.emplace_back(false);
    } else {
      stack.push_back(mapTensors(argument, is_factory ? TensorMapper{standInOf} : value_of));
    }
  }
  const OwnComputation own;
  const auto dtype = countsOnlyFloats(op) ? stack.front().toTensor().scalar_type() : c10::kFloat;
  const bool counts_integers = c10::isIntegralType(dtype, /*includeBool=*/false);
  if (counts_integers) {
    stack.front() = stack.front().toTensor().to(c10::kDouble);
  }
  op.callBoxed(stack);
  if (counts_integers) {
    stack.front() = stack.front().toTensor().to(dtype);
  }
  return stack;
}

std::optional<std::array<Scalar, 3>> rangeOf(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (op.schema().name() != "aten::arange" || hasOut(op)) {
    return std::nullopt;
  }
  const std::string& overload = op.schema().overload_name();
  const Scalar first = arguments[0].toScalar();
  if (overload.empty()) {
    return {{0, first, 1}};
  }
  return {{first, arguments[1].toScalar(), overload == "start" ? Scalar{1} : arguments[2].toScalar()}};
}

Tensor fakeOn(c10::Device device, const Tensor& value) {
  const FakeFactoriesGuard guard;
  return at::empty_strided(value.sizes(), value.strides(), at::TensorOptions(value.scalar_type()).device(device));
}

bool isMadeByCall(const Tensor& result, ArrayRef<IValue> arguments) {
  return isFake(result) && !hasTensor(arguments, [&result](const Tensor& argument) {
           return argument.has_storage() && isSameStorage(argument.storage(), result.storage());
         });
}

void giveValues(ArrayRef<IValue> results, ArrayRef<IValue> values, ArrayRef<IValue> arguments, ValueKind kind) {
  std::vector<Tensor> made;
  forEachTensor(values, [&made](const Tensor& value) { made.push_back(value); });
  std::size_t position = 0;
  forEachTensor(results, [&](const Tensor& result) {
    const Tensor& value = made.at(position++);
    // The kernel of another device may return other sizes: `log_sigmoid_forward_cuda()` has an empty buffer.
    if (isMadeByCall(result, arguments) && value.sizes() == result.sizes()) {
      setValue(result, value, kind);
    }
  });
}

Stack runLimited(const OperatorHandle& op, ArrayRef<IValue> arguments, TensorMapper value_of) {
  const AllocationLimit limit{kMaxBytesOfResults};
  try {
    return runOn(op, arguments, value_of);
  } catch (const std::bad_alloc&) {
    TORCHEXT_THROW(DataDependentError,
                   c10::str("The result of `", op.operator_name(), "` exceeds ", kMaxBytesOfResults >> 20,
                            " MiB, the limit for results that depend on known values of fake tensors."));
  }
}

Stack runOnValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  Stack values = arguments.vec();
  for (const auto i : c10::irange(arguments.size())) {
    if (op.schema().arguments()[i].is_out()) {
      const HiddenCalls guard;
      values[i] = mapTensors(values[i], [](const Tensor& out) {
        return at::empty_strided(out.sizes(), out.strides(), at::TensorOptions(out.scalar_type()).device(c10::kCPU));
      });
    }
  }
  // An `out` is already real.
  return runLimited(op, values, [](const Tensor& tensor) { return isFake(tensor) ? valueOf(tensor) : tensor; });
}

}  // namespace torchext
