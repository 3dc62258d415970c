#include "assumed_elements.h"

#include <algorithm>
#include <cmath>

#include <ATen/core/enum_tag.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "assumptions.h"
#include "known_bytes.h"
#include "known_values.h"

namespace torchext {

bool isOpen(const Tensor& tensor) {
  return isFake(tensor) && isPlain(tensor) && tensor.numel() > 1 && tensor.scalar_type() != c10::kBool &&
         !valueOf(tensor, ValueKind::kAssumed).defined() && !elementsOf(tensor).defined();
}

std::vector<int64_t> sizesOfOne(const Tensor& tensor) {
  return std::vector<int64_t>(toSize(tensor.dim()), 1);
}

Tensor elementFor(const Tensor& tensor) {
  const Tensor value = isPlain(tensor) ? valueOf(tensor, ValueKind::kAssumed) : Tensor{};
  if (value.defined()) {
    return value.numel() == 1 ? value : Tensor{};
  }
  std::vector<int64_t> sizes = sizesOfOne(tensor);
  Tensor pattern = elementsOf(tensor);
  if (!pattern.defined() && isMask(tensor)) {
    pattern = policyHere().masks;
  }
  if (pattern.defined()) {
    if (!sizes.empty()) {
      sizes.back() = pattern.numel();
    }
    return repeated(pattern, sizes);
  }
  const bool is_integer = isDiscrete(tensor);
  const bool is_ordinary = is_integer && !isSmall(tensor);
  return filled(sizes, tensor.scalar_type(), is_ordinary ? kOrdinaryInteger : is_integer ? 0 : kAssumedNumber);
}

Tensor countsOf(const OperatorHandle& op, ArrayRef<IValue> arguments, const Tensor& counted) {
  const Tensor pattern = elementsOf(counted);
  if (!pattern.defined()) {
    return {};
  }
  const auto countIn = [&](const Tensor& part) {
    return runOn(op, arguments, [&part](const Tensor& /*counted*/) { return part; }).front().toTensor();
  };
  const Tensor once = countIn(pattern);
  const Tensor rest = countIn(pattern.slice(0, 0, counted.numel() % pattern.numel()));
  const HiddenCalls guard;
  const Tensor counts = once.mul(counted.numel() / pattern.numel());
  counts.slice(0, 0, rest.numel()).add_(rest);  // `bincount()` of fewer numbers may be shorter
  return counts;
}

namespace {

bool isAnyOrAll(const OperatorHandle& op) {
  return op.schema().name() == "aten::any" || op.schema().name() == "aten::all";
}

}  // namespace

bool assumeElements(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (results.size() != 1 || !results.front().isTensor() || hasOut(op) || !canRunOnValues(op)) {
    return false;
  }
  const Tensor& result = results.front().toTensor();
  const bool is_elementwise = op.hasTag(at::Tag::pointwise) || op.schema().name() == "aten::_to_copy";
  const bool makes_truth = result.scalar_type() == c10::kBool && (is_elementwise || isAnyOrAll(op));
  const auto repeats = [](const Tensor& tensor) { return elementsOf(tensor).defined(); };
  const auto is_open = [](const Tensor& tensor) { return isOpen(tensor); };
  const bool follows = is_elementwise && hasTensor(arguments, repeats) && !hasTensor(arguments, is_open);
  const auto has_elements = [](const Tensor& tensor) { return elementFor(tensor).defined(); };
  if ((!makes_truth && !follows) || !allTensors(arguments, has_elements)) {
    return false;
  }
  const ValueKind kind = standingOn(arguments);
  try {
    setElements(result, runOn(op, arguments, elementFor).front().toTensor().clone(), kind);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

bool assumeCounts(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const std::string& name = op.schema().name();
  const bool is_mean = name == "aten::mean";
  if (hasOut(op) || (name != "aten::sum" && name != "aten::count_nonzero" && name != "aten::histc" && !is_mean)) {
    return false;
  }
  const Tensor& counts = results.front().toTensor();
  const Tensor& counted = arguments.front().toTensor();
  const ValueKind kind = standingOn(arguments);
  if (name == "aten::histc") {
    const Tensor values = countsOf(op, arguments, counted);
    return values.defined() && (setValue(counts, values, kind), true);
  }
  const Tensor elements = isMask(counted) ? elementFor(counted) : elementsOf(counted);
  if (!elements.defined()) {
    return false;
  }
  const HiddenCalls guard;
  const auto each = static_cast<double>(counted.numel() / std::max<int64_t>(counts.numel(), 1));
  const Tensor summed = name == "aten::count_nonzero" ? elements.to(c10::kBool) : elements;
  const double sum = summed.to(c10::kDouble).mean().item().toDouble() * (is_mean ? 1 : each);
  const c10::ScalarType dtype = counts.scalar_type();
  setElements(counts, filled({1}, dtype, isDiscrete(counts) ? std::ceil(sum) : sum), kind);
  return true;
}

}  // namespace torchext
