#include "assumed_masks.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../../libraries/support/stack_utils.h"
#include "assumed_elements.h"
#include "assumptions.h"
#include "known_bytes.h"
#include "known_values.h"

namespace torchext {

namespace {

// Numbers that a tensor without known values may contain. The first is ordinary.
constexpr std::array<double, 3> kNumbers{kAssumedNumber, 256, -256};
constexpr std::array<double, 2> kIntegers{kOrdinaryInteger, -100};

// Returns the value of `tensor` in a trial: one or a few elements, unless all tensors of the call are small.
Tensor trialValueOf(const Tensor& tensor, bool are_small, std::size_t trial) {
  if (!isOpen(tensor)) {
    return are_small ? assumedValueOf(tensor) : elementFor(tensor);
  }
  const double number = isDiscrete(tensor) ? kIntegers.at(std::min(trial, kIntegers.size() - 1)) : kNumbers.at(trial);
  const auto sizes = are_small ? tensor.sizes().vec() : sizesOfOne(tensor);
  const Tensor tried = filled(sizes, tensor.scalar_type(), number);
  return are_small ? withParts(tensor, tried) : tried;
}

// The result of a test for ordinary numbers, and the elements for which other numbers have another result.
struct TestedNumbers {
  Tensor ordinary;
  Tensor differs;
};

TestedNumbers testNumbers(const OperatorHandle& op, ArrayRef<IValue> arguments, bool are_small, bool are_integers) {
  const auto truth_of = [&](std::size_t trial) {
    const auto value_of = [=](const Tensor& tensor) { return trialValueOf(tensor, are_small, trial); };
    return runOn(op, arguments, value_of).front().toTensor();
  };
  const Tensor ordinary = truth_of(0);
  Tensor differs = at::full_like(ordinary, false);
  for (const auto trial : c10::irange(std::size_t{1}, are_integers ? kIntegers.size() : kNumbers.size())) {
    differs = differs.logical_or(truth_of(trial).ne(ordinary));
  }
  return {ordinary, differs};
}

// Returns a mask of `sizes` of the elements for which an open argument has no value. All arguments must be small.
Tensor openElements(ArrayRef<IValue> arguments, c10::IntArrayRef sizes) {
  Tensor open = at::zeros(sizes, c10::kBool);
  forEachTensor(arguments, [&open](const Tensor& tensor) {
    if (isOpen(tensor)) {
      const auto parts = partsOf(tensor, ValueKind::kAssumed);
      open = parts ? open.logical_or(parts->written.logical_not()) : at::ones_like(open);
    }
  });
  return open;
}

bool makesMaskOfOpen(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  return results.size() == 1 && results.front().isTensor() && isMask(results.front().toTensor()) &&
         op.hasTag(at::Tag::pointwise) && canRunOnValues(op) && isMadeByCall(results.front().toTensor(), arguments) &&
         hasTensor(arguments, isOpen);
}

}  // namespace

bool assumeMask(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!makesMaskOfOpen(op, arguments, results)) {
    return false;
  }
  const bool are_small = areSmall(arguments) && areSmall(results);
  if (!are_small && !allTensors(arguments, [](const Tensor& tensor) { return elementFor(tensor).defined(); })) {
    return false;
  }
  const std::string& name = op.schema().name();
  const bool is_equality = name == "aten::eq" || name == "aten::ne";
  const bool compares_two = arguments.back().isTensor() && allTensors(arguments, isOpen);
  const bool are_integers =
      allTensors(arguments, [](const Tensor& tensor) { return !isOpen(tensor) || isDiscrete(tensor); });
  const Tensor& mask = results.front().toTensor();
  const ValueKind kind = standingOn(arguments);
  try {
    const HiddenCalls guard;
    auto [ordinary, differs] = testNumbers(op, arguments, are_small, are_integers);
    if (is_equality && !compares_two) {
      differs = are_small ? openElements(arguments, mask.sizes()) : at::ones_like(ordinary);
    }
    const Tensor passes = are_integers || is_equality ? ordinary : at::ones_like(ordinary);
    const Tensor counts = are_small ? repeated(policyHere().masks, mask.sizes()) : elementFor(mask);
    setElements(mask, at::where(differs, passes.eq(counts), ordinary),
                differs.any().item().toBool() ? kind | policyHere().kind : kind);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

}  // namespace torchext
