#include "follow_values.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "assumed_values.h"
#include "known_values.h"

namespace torchext {

namespace {

const OperatorSet makesZeros{"make zeros", {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::zero_"}};
const OperatorSet makesOnes{"make ones", {"aten::ones", "aten::ones_like", "aten::new_ones"}};

// Returns true or false for an operator that only makes or writes ones or zeros, respectively.
std::optional<bool> fillOf(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const bool makes_zeros = makesZeros(op);
  if (makes_zeros || makesOnes(op)) {
    return hasOut(op) ? std::nullopt : std::optional{!makes_zeros};
  }
  if (op.schema().name() != "aten::fill_" || !arguments[1].isScalar() || arguments[1].isComplexDouble()) {
    return std::nullopt;
  }
  const double value = arguments[1].toScalar().toDouble();
  const bool is_zero = value == 0 && !std::signbit(value);
  return is_zero || value == 1 ? std::optional{value == 1} : std::nullopt;
}

// Returns the number of nonzero elements of the real tensor `value`.
int64_t countNonzero(const Tensor& value) {
  const HiddenCalls guard;
  return value.count_nonzero().item().toLong();
}

bool isMaskDtype(c10::ScalarType dtype) {
  return dtype == c10::kBool || dtype == c10::kByte;
}

// Returns the number of nonzero elements among `count` elements that repeat `pattern`.
int64_t countOf(int64_t count, const Tensor& pattern) {
  return (count * countNonzero(pattern) + pattern.numel() - 1) / pattern.numel();
}

// Returns how many elements are assumed to count of `mask`, broadcast to `copies` times its elements.
int64_t countByMask(
    const OperatorHandle& op, const Tensor& mask, bool is_prediction, int64_t copies, Assumptions& assumptions) {
  const Tensor pattern = elementsOf(mask);
  const bool is_of_few = isSmall(mask) && hasValue(mask);
  const int64_t count = copies * (is_of_few ? countNonzero(assumedValueOf(mask))
                                            : countOf(mask.numel(), pattern.defined() ? pattern : policyHere().masks));
  if (!is_prediction) {
    assumptions.note(op, c10::str(count, " of ", copies * mask.numel(), " elements"), standingOn(IValue{mask}));
  }
  return count;
}

Tensor fakeOf(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const FakeFactoriesGuard guard;
  return at::empty(sizes, options);
}

// Returns how many elements `mask` selects, or nothing if this is neither known nor assumed.
std::optional<int64_t> countSelected(const OperatorHandle& op, const Tensor& mask, bool is_prediction) {
  if (const Tensor value = valueOf(mask); value.defined()) {
    return countNonzero(value);
  }
  Assumptions* const assumptions = isFake(mask) ? assumptionsInUse() : nullptr;
  return assumptions == nullptr ? std::nullopt
                                : std::optional{countByMask(op, mask, is_prediction, /*copies=*/1, *assumptions)};
}

// Gives overwritten tensors bytes before a call, so that their new values are recorded, and appends them to `given`.
// Returns false if there is no room.
bool giveBytes(const OperatorHandle& op, ArrayRef<IValue> arguments, std::vector<Tensor>& given) {
  bool has_room = true;
  forEachWritten(op.schema(), arguments, [&](const Tensor& tensor, std::size_t position) {
    if (isFake(tensor) && !valueOf(tensor).defined() && overwritesUnknown(op, position, tensor)) {
      has_room = makePart(tensor, ValueKind::kKnown) && has_room;  // keeps what other arguments show of it
      given.push_back(tensor);
    }
  });
  return has_room;
}

bool isAllOnCpu(ArrayRef<IValue> values) {
  return !hasTensor(values, [](const Tensor& value) { return !value.is_cpu(); });
}

// Runs `op` on the known values. Returns nothing if the CPU kernel raises but the fakes are on another device, whose
// kernel might not raise.
std::optional<Stack> tryRunOnKnown(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  try {
    return runOn(op, arguments, [](const Tensor& tensor) { return valueOf(tensor); });
  } catch (const c10::Error&) {
    if (isAllOnCpu(arguments) && isAllOnCpu(results)) {
      throw;
    }
    return std::nullopt;
  }
}

// Stores zeros and ones as fills, or as a repeated element in a large mask or tensor of integers. Returns false for a
// call that makes or writes other values.
bool followFill(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const auto fill = results.size() == 1 && results.front().isTensor() ? fillOf(op, arguments) : std::nullopt;
  if (!fill) {
    return false;
  }
  const Tensor& filled = results.front().toTensor();
  // A fill of a tensor with a negative bit leaves -0.0 in memory. Existing bytes may be shared with an array.
  const bool is_new =
      isMadeByCall(filled, arguments) || (overwritesArgument(op, 0) && coversStorage(filled) && !hasValue(filled));
  if (filled.is_neg() || !is_new) {
    return false;
  }
  if (!isSmall(filled)) {
    const HiddenCalls guard;
    setElements(filled, at::full({1}, *fill ? 1 : 0, at::TensorOptions(filled.scalar_type())), ValueKind::kKnown);
    return true;
  }
  setFill(filled, *fill);
  return true;
}

// Returns false if the values of the results and of the written arguments are unknown.
bool followKnown(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const bool are_small = areSmall(results);
  if (!canRunOnValues(op) || (!are_small && !mayBeAssumed(results))) {
    return false;
  }
  if (followFill(op, arguments, results)) {
    return true;
  }
  if (!are_small || !areValuesKnown(op, arguments)) {
    return false;
  }
  if (const auto range = rangeOf(op, arguments)) {
    const auto& [start, end, step] = *range;
    setRange(results.front().toTensor(), start, end, step);
    return true;
  }
  std::vector<Tensor> given;
  auto remove = c10::make_scope_exit([&given] {
    for (const Tensor& tensor : given) {
      forgetElements(tensor);
    }
  });
  const auto values = giveBytes(op, arguments, given) ? tryRunOnKnown(op, arguments, results) : std::nullopt;
  if (!values) {
    return false;
  }
  remove.release();
  giveValues(results, *values, arguments, ValueKind::kKnown);
  return true;
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

void expandMasks(const OperatorHandle& op, Stack& stack, bool is_prediction) {
  if (!isMaskedIndexing(op, stack) || isRecording()) {
    return;
  }
  const std::size_t count = op.schema().arguments().size();
  const bool has_fake = hasTensor(topOf(stack, count), [](const Tensor& tensor) { return isFake(tensor); });
  if (!has_fake || areValuesKnown(op, topOf(stack, count))) {
    return;  // it is run for real, or the values of the result become known
  }
  IValue& indices = torch::jit::peek(stack, 1, count);
  const Tensor self = torch::jit::peek(stack, 0, count).toTensor();
  c10::List<std::optional<Tensor>> expanded;
  int64_t dim = 0;
  for (const IValue& element : indices.toListRef()) {
    const Tensor index = element.isNone() ? Tensor{} : element.toTensor();
    if (!index.defined() || !isMaskDtype(index.scalar_type())) {
      expanded.push_back(index.defined() ? std::optional{index} : std::nullopt);
      ++dim;
      continue;
    }
    if (dim + index.dim() > self.dim() || !index.sizes().equals(self.sizes().slice(toSize(dim), toSize(index.dim())))) {
      return;  // does not fit
    }
    const auto selected = countSelected(op, index, is_prediction);
    if (!selected) {
      return;
    }
    for (int64_t i = 0; i < index.dim(); ++i, ++dim) {
      expanded.push_back(fakeOf({*selected}, at::TensorOptions(c10::kLong).device(index.device())));
    }
  }
  indices = std::move(expanded);
}

namespace {

// A mask may be broadcast to the tensor that it selects from.
Stack selected(const Tensor& self, const Tensor& mask, const Tensor& value) {
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  return {fakeOf({countNonzero(value.expand(sizes))}, self.options())};
}

// The lengths also determine how many sequences each step has.
Stack packed(const Tensor& input, const Tensor& lengths, bool batch_first) {
  Tensor rows;
  Tensor steps;
  {
    const HiddenCalls guard;
    const Tensor like = at::zeros({input.size(0), input.size(1), 1}, at::TensorOptions(c10::kByte));
    std::tie(rows, steps) = at::_pack_padded_sequence(like, lengths, batch_first);
  }
  std::vector<int64_t> sizes = input.sizes().slice(1).vec();
  sizes.front() = rows.size(0);
  const Tensor batch_sizes = fakeOf(steps.sizes(), at::TensorOptions(c10::kLong));
  setValue(batch_sizes, steps, ValueKind::kKnown);
  return {fakeOf(sizes, input.options()), batch_sizes};
}

// (self, weights, minlength). `positions` are the values of `self`. The kernel runs for its errors, on few counts.
Stack counted(const Tensor& positions, const Tensor& weights, int64_t minlength) {
  int64_t needed = 0;
  c10::ScalarType dtype{};
  {
    const HiddenCalls guard;
    const Tensor zeros = at::zeros({}, at::TensorOptions(weights.scalar_type())).expand(weights.sizes());
    dtype = at::bincount(positions.clamp_max(0), zeros, std::min<int64_t>(minlength, 0)).scalar_type();
    needed = positions.numel() == 0 ? 0 : positions.max().item().toLong() + 1;
  }
  return {fakeOf({std::max(needed, minlength)}, weights.options().dtype(dtype))};
}

// Returns the results of a call whose shapes depend only on the values of one argument: the mask of `masked_select`,
// the lengths of a packed sequence, or the positions of `bincount`. The other data need no values. Returns nothing for
// other calls, or if `value_of` does not have the values. Calls operators on fakes.
std::optional<Stack> resultsBySizes(const OperatorHandle& op, ArrayRef<IValue> arguments, TensorMapper value_of) {
  const std::string& name = op.schema().name();
  const bool is_whole = op.schema().overload_name().empty();
  const bool counts = name == "aten::bincount" && is_whole && arguments[1].isTensor() &&
                      arguments[1].toTensor().device() == arguments[0].toTensor().device();
  const bool selects = name == "aten::masked_select" && is_whole;
  const bool packs = name == "aten::_pack_padded_sequence";
  if (!counts && !selects && !packs) {
    return std::nullopt;
  }
  const Tensor& read = arguments[counts ? 0 : 1].toTensor();
  TORCH_CHECK(!packs || read.is_cpu(), "'lengths' argument should be a 1D CPU int64 tensor, but got ", read.dim(), "D ",
              read.device(), " ", read.scalar_type(), " tensor");  // the values are on the CPU
  const Tensor value = isSmall(read) ? value_of(read) : Tensor{};
  if (!value.defined()) {
    return std::nullopt;
  }
  if (counts) {
    return counted(value, arguments[1].toTensor(), arguments[2].toInt());
  }
  const Tensor& self = arguments.front().toTensor();
  return selects ? selected(self, read, value) : packed(self, value, arguments[2].toBool());
}

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
  const int64_t count =
      countByMask(op, mask, /*is_prediction=*/false, numel / std::max<int64_t>(mask.numel(), 1), assumptions);
  return Stack{is_selection ? fakeOf({count}, self.options())
                            : fakeOf({count, self.dim()}, self.options().dtype(c10::kLong))};
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

// Returns the results, with assumed values, of a call that reads values. Returns nothing if it reads no values, or if
// values are not assumed.
std::optional<Stack> assumeValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  Assumptions* const assumptions = assumptionsInUse();
  if (assumptions == nullptr) {
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

}  // namespace

bool answerForValues(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  if (isRecording()) {
    return false;
  }
  if (hooks().kernels.compareDevices(op)) {
    outputDevice(op, stack);  // raises for arguments on different devices
  }
  const auto arguments = topOf(stack, count);
  auto results = resultsBySizes(op, arguments, [](const Tensor& tensor) { return valueOf(tensor); });
  if (!results) {
    results = assumeValues(op, arguments);
  }
  if (!results) {
    return false;
  }
  replaceTop(stack, count, *std::move(results));
  return true;
}

void followValues(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (op.hasTag(at::Tag::inplace_view)) {
    return;  // metadata only
  }
  const Stack written = writtenBy(op, arguments);
  const bool makes = hasTensor(results, [&](const Tensor& result) { return isMadeByCall(result, arguments); });
  const bool checks = results.empty();  // `_linalg_check_errors` raises an error or does nothing
  if ((makes || checks || !written.empty()) && !followKnown(op, arguments, results) &&
      !assumeResults(op, arguments, results, written)) {
    forgetValues(written);
  }
}

}  // namespace torchext
