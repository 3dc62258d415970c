#include "assumed_values.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Scalar.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "known_values.h"

namespace torchext {

namespace {

std::atomic<Assumptions*> assumptions_in_use{nullptr};

// Returns the default values of a tensor like `like`.
Tensor defaults(const Tensor& like) {
  if (isMask(like)) {
    return repeated(policyHere().masks, like.sizes());
  }
  const c10::ScalarType dtype = like.scalar_type();
  return filled(like.sizes(), dtype, c10::isIntegralType(dtype, /*includeBool=*/true) ? 0 : policyHere().number);
}

}  // namespace

void setAssumptions(Assumptions* assumptions) noexcept {
  assumptions_in_use = assumptions;
}

Assumptions* assumptionsInUse() noexcept {
  return assumptions_in_use;
}

bool assumesValues() noexcept {
  return assumptions_in_use != nullptr;
}

LinePolicy policyHere() {
  const Assumptions* const assumptions = assumptions_in_use;
  return assumptions == nullptr ? LinePolicy{filled({1}, c10::kBool, 1), ValueKind::kByMasks, kAssumedNumber}
                                : assumptions->policyHere();
}

bool isMask(const Tensor& tensor) {
  return tensor.scalar_type() == c10::kBool && tensor.numel() > 1;
}

bool isDiscrete(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

c10::Scalar numberOf(c10::ScalarType dtype, double value) {
  if (dtype == c10::kBool) {
    return value != 0;
  }
  if (c10::isComplexType(dtype)) {
    return c10::complex<double>{value, 0};
  }
  return c10::isIntegralType(dtype, /*includeBool=*/false) ? c10::Scalar(static_cast<int64_t>(value))
                                                           : c10::Scalar(value);
}

Tensor filled(c10::IntArrayRef sizes, c10::ScalarType dtype, double number) {
  const HiddenCalls guard;
  return at::full(sizes, numberOf(dtype, number), at::TensorOptions(dtype));
}

Tensor assumedValueOf(const Tensor& fake) {
  if (const Tensor value = valueOf(fake, ValueKind::kAssumed); value.defined()) {
    return value;
  }
  const Tensor pattern = elementsOf(fake);
  return pattern.defined() ? repeated(pattern, fake.sizes()) : withParts(fake, defaults(fake));
}

void assumeValue(const Tensor& fake, const Tensor& value, ValueKind kind) {
  if (!makePart(fake, kind)) {
    markAssumed(fake, kind);  // parts of this storage cannot be distinguished
  }
  if (const Tensor assumed = valueOf(fake, ValueKind::kAssumed); assumed.defined()) {
    const HiddenCalls guard;
    assumed.copy_(value);
  }
}

bool hasAllValues(const Tensor& fake) {
  return valueOf(fake, ValueKind::kAssumed).defined() || elementsOf(fake).defined();
}

ValueKind standingOn(ArrayRef<IValue> values) {
  ValueKind kind = ValueKind::kAssumed;
  forEachTensor(values, [&kind](const Tensor& tensor) {
    if (isFake(tensor)) {
      kind = kind | kindOf(tensor) | (isMask(tensor) && !hasAllValues(tensor) ? policyHere().kind : ValueKind::kKnown);
    }
  });
  return kind;
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

// Tensors that are too large for values: a few elements that repeat stand for all of them.

// An element of a large integer tensor (such as a token) in comparisons: neither padding nor the end.
constexpr int64_t kOrdinaryInteger = 11;

// Returns true for a tensor with several numbers and without values.
bool isOpen(const Tensor& tensor) {
  return isFake(tensor) && isPlain(tensor) && tensor.numel() > 1 && tensor.scalar_type() != c10::kBool &&
         !valueOf(tensor, ValueKind::kAssumed).defined() && !elementsOf(tensor).defined();
}

// Returns as many ones as `tensor` has dimensions.
std::vector<int64_t> sizesOfOne(const Tensor& tensor) {
  return std::vector<int64_t>(toSize(tensor.dim()), 1);
}

// Returns a few elements that represent all of `tensor`, or an undefined tensor if that is impossible.
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

bool hasElement(const Tensor& tensor) {
  return elementFor(tensor).defined();
}

// NOTE [Assumed indices]
//
// Sorting, selecting and sampling return positions in a dimension of n elements. The policy for routing chooses them:
// torchext/fake/routing.py. A row of at most n positions has no duplicates. Values that depend on positions, such as
// the tokens of each expert, are computed exactly even if they are large, up to kMaxRoutedBytes. Beyond that the
// positions are a pattern that repeats.

constexpr int64_t kMaxPattern = 1 << 16;
const OperatorSet mayMakeIndices{
    "return positions in their argument",
    {"aten::topk", "aten::sort", "aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::median",
     "aten::kthvalue", "aten::mode", "aten::multinomial", "aten::nanmedian"}};

// Returns true if the positions of `scores` follow from values. Assumed scores are alike, also if a known bias was
// added to them, or if a mask of assumed positions covers some. So `topk` of them follows the policy.
bool determinesPositions(const OperatorHandle& op, const Tensor& scores) {
  const ValueKind kind = kindOf(scores);
  const bool is_score = c10::isFloatingType(scores.scalar_type()) && kind != ValueKind::kKnown;
  return hasValue(scores) && !(is_score && (op.schema().name() == "aten::topk" || kind == ValueKind::kAssumed));
}

bool makesIndices(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!mayMakeIndices(op) || hasOut(op) || determinesPositions(op, arguments.front().toTensor())) {
    return false;
  }
  const bool is_of_values = results.size() == 1 && arguments.front().toTensor().scalar_type() == c10::kLong;
  return results.back().toTensor().scalar_type() == c10::kLong && !is_of_values;
}

// Rows of positions: each row has `length` positions, which are less than `count`.
struct ChosenRows {
  int64_t count;
  int64_t length;
  std::optional<int64_t> dim;  // the dimension of the rows, if there are several positions
};

ChosenRows chosenRows(const OperatorHandle& op, ArrayRef<IValue> arguments, const Tensor& indices) {
  const Tensor& source = arguments.front().toTensor();
  const int position = findArgument(op.schema(), "dim");
  const IValue dim = position < 0 ? IValue(-1) : arguments[toSize(position)];
  const bool is_of_all = !dim.isInt() || source.dim() == 0;
  const int64_t count = std::max<int64_t>(is_of_all ? source.numel() : source.size(dim.toInt()), 1);
  if (is_of_all || indices.dim() != source.dim()) {
    return {count, 1, std::nullopt};
  }
  const int64_t wrapped = c10::maybe_wrap_dim(dim.toInt(), source.dim());
  return {count, std::max<int64_t>(indices.size(wrapped), 1), wrapped};
}

// Rearranges `positions` from the order of rows to a tensor of `sizes` with the rows in `dim`.
Tensor inDimension(const Tensor& positions, c10::IntArrayRef sizes, int64_t dim) {
  const HiddenCalls guard;
  std::vector<int64_t> by_rows = sizes.vec();
  const auto place = by_rows.begin() + static_cast<std::ptrdiff_t>(dim);
  std::rotate(place, place + 1, by_rows.end());
  return positions.view(by_rows).movedim(-1, dim);
}

// Assumes the positions that `op` returns. Returns false for other calls.
bool assumeIndices(const OperatorHandle& op,
                   ArrayRef<IValue> arguments,
                   ArrayRef<IValue> results,
                   const Assumptions& assumptions) {
  if (!makesIndices(op, arguments, results)) {
    return false;
  }
  const Tensor& indices = results.back().toTensor();
  const ChosenRows rows = chosenRows(op, arguments, indices);
  const int64_t num_rows = indices.numel() / rows.length;
  const auto choose = [&](int64_t chosen) {
    const auto [positions, policy] = assumptions.positions(rows.count, rows.length, chosen);
    return std::pair{positions, standingOn(arguments) | policy};
  };
  const bool is_partial = rows.length < rows.count;  // sorting large data returns many positions, which nothing counts
  if (isSmall(indices) || (is_partial && isSmallForRouting(indices))) {
    const auto [positions, kind] = choose(num_rows);
    setElements(indices, rows.dim ? inDimension(positions, indices.sizes(), *rows.dim) : positions, kind);
    return true;
  }
  if ((rows.dim && *rows.dim != indices.dim() - 1) || rows.length * rows.count > kMaxPattern) {
    return false;
  }
  const auto [positions, kind] = choose(std::min(num_rows, rows.count));
  setElements(indices, positions, kind);
  return true;
}

// NOTE [Assumed masks]
//
// The policy for masks is a vector of truth values, repeated over the elements of a mask: which elements count. An
// element that counts is ordinary: it differs from the number that it is compared with (`ids != padding`, `labels ==
// -100`), an integer is kOrdinaryInteger, and a floating-point number passes any threshold, in either direction. So if
// all elements count, a program selects as many as possible. For an element that does not count, the truth value is the
// opposite. If the result is the same for numbers of all sizes (`isnan()`, `x == x`), or follows from values, the
// policy is not used.

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

// Assumes which elements of a tensor without values pass the test `op`. Returns false for other calls.
bool assumeMask(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!makesMaskOfOpen(op, arguments, results)) {
    return false;
  }
  const bool are_small = areSmall(arguments) && areSmall(results);
  if (!are_small && !allTensors(arguments, hasElement)) {
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

// Computes truth values of tensors that are too large for values, and results for elements that repeat. Returns false
// for other calls.
bool assumeElements(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (results.size() != 1 || !results.front().isTensor() || hasOut(op) || !canRunOnValues(op)) {
    return false;
  }
  const Tensor& result = results.front().toTensor();
  const std::string& name = op.schema().name();
  const bool is_elementwise = op.hasTag(at::Tag::pointwise) || name == "aten::_to_copy";
  const bool makes_truth =
      result.scalar_type() == c10::kBool && (is_elementwise || name == "aten::any" || name == "aten::all");
  const auto repeats = [](const Tensor& tensor) { return elementsOf(tensor).defined(); };
  const bool follows = is_elementwise && hasTensor(arguments, repeats) && !hasTensor(arguments, isOpen);
  if ((!makes_truth && !follows) || !allTensors(arguments, hasElement)) {
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

// The same for sums of large masks and of other tensors whose elements repeat.
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

// Larger tensors of floating-point numbers are data. A program reduces them before deciding anything.
constexpr int64_t kMaxAssumedNumbers = 1024;

// Gives written tensors without values their assumed values. `kind` is that of the values to write.
void expectWrites(ArrayRef<IValue> written, ValueKind kind) {
  forEachTensor(written, [kind](const Tensor& tensor) {
    if (isFake(tensor) && !valueOf(tensor, ValueKind::kAssumed).defined()) {
      assumeValue(tensor, assumedValueOf(tensor),
                  standingOn(IValue{tensor}) | (isSmall(tensor) ? ValueKind::kKnown : kind));
    }
  });
}

// Runs `op` on values, including its writes. Returns false if its kernel refuses them.
bool runAssumed(const OperatorHandle& op,
                ArrayRef<IValue> arguments,
                ArrayRef<IValue> results,
                ArrayRef<IValue> written) {
  const ValueKind kind = standingOn(arguments);
  expectWrites(written, kind);
  if (!allTensors(written, [](const Tensor& tensor) { return valueOf(tensor, ValueKind::kAssumed).defined(); })) {
    return false;  // too many values
  }
  try {
    giveValues(results, runOn(op, arguments, assumedValueOf), arguments, kind);
  } catch (const c10::Error&) {
    forgetValues(written);
    return false;
  }
  forEachTensor(written, [kind](const Tensor& tensor) { markAssumed(tensor, kind); });
  return true;
}

bool assumeByRunning(const OperatorHandle& op,
                     ArrayRef<IValue> arguments,
                     ArrayRef<IValue> results,
                     ArrayRef<IValue> written) {
  const bool is_routed =
      hasTensor(arguments, [](const Tensor& tensor) { return isFake(tensor) && isRouted(kindOf(tensor)); });
  const auto is_small = [is_routed](const Tensor& tensor) {
    return isSmall(tensor) || (is_routed && isSmallForRouting(tensor));
  };
  const auto can_be_read = [&](const Tensor& tensor) {
    return isPlain(tensor) && (isSmall(tensor) || (isDiscrete(tensor) && is_small(tensor)));
  };
  if (!canRunOnValues(op) || !allTensors(arguments, can_be_read) || !allTensors(results, isPlain) ||
      !allTensors(results, is_small)) {
    return false;
  }
  const bool has_value = hasTensor(arguments, hasValue);
  const bool converts = op.schema().name() == "aten::_to_copy";
  const auto is_worth_it = [=](const Tensor& tensor) {
    return isDiscrete(tensor) || tensor.numel() == 1 ||
           (has_value && (converts || tensor.numel() <= kMaxAssumedNumbers));
  };
  return allTensors(results, is_worth_it) && allTensors(written, is_worth_it) &&
         runAssumed(op, arguments, results, written);
}

// Draws integers, for example a permutation.
bool assumeDraws(const OperatorHandle& op,
                 ArrayRef<IValue> arguments,
                 ArrayRef<IValue> results,
                 ArrayRef<IValue> written) {
  static const at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/0);
  if (!op.hasTag(at::Tag::nondeterministic_seeded) || !takesGenerator(op) || !areSmall(arguments) ||
      !allTensors(arguments, isDiscrete) || !allTensors(results, isDiscrete)) {
    return false;
  }
  Stack drawing = arguments.vec();
  for (const auto i : c10::irange(arguments.size())) {
    if (isGenerator(op.schema().arguments()[i])) {
      drawing[i] = generator;
    }
  }
  return runAssumed(op, drawing, results, written);
}

// Assumes that gradients are finite. The operator also unscales them, so it cannot run on `found_inf` alone.
bool assumeFinite(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (op.schema().name() != "aten::_amp_foreach_non_finite_check_and_unscale_") {
    return false;
  }
  forgetValues(arguments.front());
  const Tensor& found = arguments[1].toTensor();
  if (hasValue(found)) {
    markAssumed(found, ValueKind::kAssumed);
  } else {
    setValue(found, at::full(found.sizes(), 0, at::TensorOptions(found.scalar_type()).device(c10::kCPU)),
             ValueKind::kAssumed);
  }
  return true;
}

}  // namespace

bool mayBeAssumed(ArrayRef<IValue> results) {
  return assumesValues() &&
         hasTensor(results, [](const Tensor& result) { return isDiscrete(result) || result.numel() == 1; });
}

bool assumeResults(const OperatorHandle& op,
                   ArrayRef<IValue> arguments,
                   ArrayRef<IValue> results,
                   ArrayRef<IValue> written) {
  const Assumptions* const assumptions = assumptionsInUse();
  if (assumptions == nullptr || isRecording() || namespaceOf(op.operator_name()) != "aten") {
    return false;
  }
  return assumeFinite(op, arguments) || assumeIndices(op, arguments, results, *assumptions) ||
         assumeDraws(op, arguments, results, written) || assumeMask(op, arguments, results) ||
         assumeByRunning(op, arguments, results, written) || assumeElements(op, arguments, results) ||
         assumeCounts(op, arguments, results);
}

}  // namespace torchext
