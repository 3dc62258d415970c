#include "assumed_reads.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "assumed_values.h"
#include "assumptions.h"
#include "follow_values.h"
#include "known_bytes.h"
#include "known_values.h"

namespace torchext {

namespace {

// Returns the number of nonzero elements among `count` elements that repeat `pattern`.
int64_t countOf(int64_t count, const Tensor& pattern) {
  return (count * countNonzero(pattern) + pattern.numel() - 1) / pattern.numel();
}

// Like assumedCount(), for a mask that is broadcast to `copies` times its elements.
int64_t countByMask(
    const OperatorHandle& op, const Tensor& mask, Noting noting, int64_t copies, Assumptions& assumptions) {
  const Tensor pattern = elementsOf(mask);
  const bool is_of_few = isSmall(mask) && hasValue(mask);
  const int64_t count = copies * (is_of_few ? countNonzero(assumedValueOf(mask))
                                            : countOf(mask.numel(), pattern.defined() ? pattern : policyHere().masks));
  if (noting == Noting::kNotes) {
    assumptions.note(op, c10::str(count, " of ", copies * mask.numel(), " elements"), standingOn(IValue{mask}));
  }
  return count;
}

}  // namespace

Tensor assumedLengths(const OperatorHandle& op, const Tensor& lengths, int64_t most) {
  const Tensor value = valueOf(lengths, ValueKind::kAssumed);
  Assumptions* const assumptions = assumptionsInUse();
  if (value.defined() || assumptions == nullptr) {
    return value;
  }
  const int64_t length = std::min(std::max<int64_t>(countOf(most, policyHere().masks), 1), most);
  assumptions->note(op, c10::str("lengths of ", length, " of ", most), policyHere().kind);
  return withParts(lengths, filled(lengths.sizes(), lengths.scalar_type(), static_cast<double>(length)));
}

Tensor assumedShares(const OperatorHandle& op, const Tensor& lengths, int64_t total) {
  const Tensor value = valueOf(lengths, ValueKind::kAssumed);
  Assumptions* const assumptions = assumptionsInUse();
  if (value.defined() || assumptions == nullptr || lengths.numel() == 0) {
    return value;
  }
  const int64_t length = total / lengths.numel();
  assumptions->note(op, c10::str(lengths.numel(), " lengths of ", total, " together"), ValueKind::kAssumed);
  Tensor shares = filled(lengths.sizes(), lengths.scalar_type(), static_cast<double>(length));
  const HiddenCalls guard;
  shares.flatten()[-1].add_(total % lengths.numel());
  return shares;
}

std::optional<int64_t> assumedCount(const OperatorHandle& op, const Tensor& mask, Noting noting) {
  Assumptions* const assumptions = assumptionsInUse();
  if (assumptions == nullptr || isRecording()) {
    return std::nullopt;
  }
  return countByMask(op, mask, noting, /*copies=*/1, *assumptions);
}

std::optional<bool> assumeEqual(const OperatorHandle& op, const Tensor& a, const Tensor& b) {
  Assumptions* const assumptions = assumptionsInUse();
  if (assumptions == nullptr || isRecording()) {
    return std::nullopt;
  }
  const bool is_exact = op.schema().name() == "aten::equal";
  if (is_exact && a.sizes() != b.sizes()) {
    return false;
  }
  const Tensor first = valueOf(a, ValueKind::kAssumed);
  const Tensor second = valueOf(b, ValueKind::kAssumed);
  std::optional<double> computed;
  if (first.defined() && second.defined()) {
    const HiddenCalls guard;
    computed = is_exact ? first.equal(second) : at::allclose(first, second);
  }
  return assumptions->answer(op, c10::kBool, computed, kindOf(a) | kindOf(b)) != 0;
}

namespace {

// Returns fakes for `values`, the results of a call whose shapes depend on values.
Stack fakesWithValues(ArrayRef<IValue> values, c10::Device device, ValueKind kind) {
  Stack fakes(values.begin(), values.end());
  mapTensors(fakes, fakes.size(), [device, kind](const Tensor& value) {
    Tensor fake = fakeOn(device, value);
    setValue(fake, value, kind);
    return fake;
  });
  return fakes;
}

std::string shapesOf(ArrayRef<IValue> results) {
  std::string shapes;
  forEachTensor(results, [&shapes](const Tensor& result) {
    shapes += c10::str(shapes.empty() ? "shape " : ", ", result.sizes());
  });
  return shapes;
}

// Returns the small results of a call whose shapes depend on values, or nothing.
std::optional<Stack> resultsOfSmall(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  const bool counts = op.schema().name() == "aten::bincount" && !areSmall(arguments);
  if (namespaceOf(op.operator_name()) != "aten" || hasOut(op) || (!counts && !areSmall(arguments)) ||
      !allTensors(arguments, isPlain)) {
    return std::nullopt;
  }
  const ValueKind kind = standingOn(arguments);
  try {
    const Stack values = counts ? Stack{countsOf(op, arguments, arguments.front().toTensor())}
                                : runLimited(op, arguments, assumedValueOf);
    if (values.empty() || (values.front().isTensor() && !values.front().toTensor().defined())) {
      return std::nullopt;
    }
    assumptions.note(op, shapesOf(values), kind);
    return fakesWithValues(values, arguments.front().toTensor().device(), kind);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// The same for the positions, or the elements, that a large mask selects.
std::optional<Stack> resultsOfMask(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  const std::string& name = op.schema().name();
  const bool is_selection = name == "aten::masked_select";
  if ((!is_selection && name != "aten::nonzero") || hasOut(op)) {
    return std::nullopt;
  }
  const Tensor& self = arguments.front().toTensor();
  const Tensor& mask = is_selection ? arguments[1].toTensor() : self;
  const int64_t numel = c10::multiply_integers(at::infer_size(self.sizes(), mask.sizes()));
  const int64_t count = countByMask(op, mask, Noting::kNotes, numel / std::max<int64_t>(mask.numel(), 1), assumptions);
  const FakeFactoriesGuard guard;
  return Stack{is_selection ? at::empty({count}, self.options())
                            : at::empty({count, self.dim()}, self.options().dtype(c10::kLong))};
}

// The same for a packed sequence.
std::optional<Stack> resultsOfLengths(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  if (op.schema().name() != "aten::_pack_padded_sequence") {
    return std::nullopt;
  }
  const int64_t most = arguments.front().toTensor().size(arguments[2].toBool() ? 1 : 0);
  const Tensor& lengths = arguments[1].toTensor();
  const ValueKind kind = standingOn(IValue{lengths}) | (hasAllValues(lengths) ? ValueKind::kKnown : policyHere().kind);
  auto results = resultsBySizes(op, arguments, [&](const Tensor& t) { return assumedLengths(op, t, most); });
  if (results) {
    assumptions.note(op, shapesOf(*results), kind);
    forEachTensor(ArrayRef<IValue>(*results), [kind](const Tensor& result) { markAssumed(result, kind); });
  }
  return results;
}

// Returns the number that `op` reads, or nothing for an operator that does not read a number.
std::optional<IValue> numberRead(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  const std::string& name = op.schema().name();
  if (name == "aten::equal") {
    return assumeEqual(op, arguments.front().toTensor(), arguments[1].toTensor());
  }
  if (name != "aten::_local_scalar_dense") {
    return std::nullopt;
  }
  const Tensor& read = arguments.front().toTensor();
  const Tensor value = c10::isComplexType(read.scalar_type()) ? Tensor{} : valueOf(read, ValueKind::kAssumed);
  const HiddenCalls guard;
  const auto computed = value.defined() ? std::optional{value.item().toDouble()} : std::nullopt;
  const double answer = assumptions.answer(op, read.scalar_type(), computed, kindOf(read));
  return value.defined() ? value.item() : numberOf(read.scalar_type(), answer);
}

}  // namespace

std::optional<Stack> assumeValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  Assumptions* const assumptions = assumptionsInUse();
  if (assumptions == nullptr || isRecording()) {
    return std::nullopt;
  }
  if (auto number = numberRead(op, arguments, *assumptions)) {
    return Stack{*std::move(number)};
  }
  if (auto results = resultsOfLengths(op, arguments, *assumptions)) {
    return results;
  }
  if (auto results = resultsOfSmall(op, arguments, *assumptions)) {
    return results;
  }
  return resultsOfMask(op, arguments, *assumptions);
}

}  // namespace torchext
