#include "assumed_values.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/Scalar.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../calls/hidden_keys.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "../storage/fake_factories.h"
#include "known_values.h"
#include "value_shapes.h"

namespace torchext {

using at::Tensor;
using c10::ArrayRef;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

std::atomic<Assumptions*> assumptions_in_use{nullptr};

// Floating-point numbers in greater numbers are data, on which a program decides nothing before it has reduced them.
constexpr int64_t kMaxAssumedNumbers = 1024;

// One of many integers, such as tokens, when they are compared with a number: neither padding nor the end.
constexpr int64_t kOrdinaryInteger = 11;

// As `_local_scalar_dense` makes it: of the kind of the dtype.
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

double defaultNumber(c10::ScalarType dtype, bool is_mask) {
  if (c10::isIntegralType(dtype, /*includeBool=*/true)) {
    return dtype == c10::kBool && is_mask ? 1 : 0;
  }
  return kAssumedNumber;
}

bool isMask(const Tensor& tensor) {
  return tensor.scalar_type() == c10::kBool && tensor.numel() > 1;
}

// Returns a tensor of `sizes` with the default values of a tensor like `like`.
Tensor defaults(const Tensor& like, c10::IntArrayRef sizes) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const c10::ScalarType dtype = like.scalar_type();
  return at::full(sizes, numberOf(dtype, defaultNumber(dtype, isMask(like))), at::TensorOptions(dtype));
}

bool isDiscrete(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

template <typename Predicate>
bool areAll(ArrayRef<IValue> values, Predicate is_wanted) {
  return !hasTensor(values, [&is_wanted](const Tensor& tensor) { return !is_wanted(tensor); });
}

bool isPyTorchs(const OperatorHandle& op) {
  return namespaceOf(op.operator_name()) == "aten";
}

// Gives what is written without having values those that it is assumed to have.
void expectWrites(ArrayRef<IValue> written) {
  forEachTensor(written, [](const Tensor& tensor) {
    if (isFake(tensor) && !valueOf(tensor, ValueKind::kAssumed).defined()) {
      assumeValue(tensor, defaults(tensor, tensor.sizes()));
    }
  });
}

// Runs `op` on values, writes included. Returns false if its kernel refuses them.
bool runAssumed(const OperatorHandle& op,
                ArrayRef<IValue> arguments,
                ArrayRef<IValue> results,
                ArrayRef<IValue> written) {
  expectWrites(written);
  if (!areAll(written, [](const Tensor& tensor) { return valueOf(tensor, ValueKind::kAssumed).defined(); })) {
    return false;  // they would be too many
  }
  try {
    giveValues(results, runOn(op, arguments, assumedValueOf), arguments, ValueKind::kAssumed);
  } catch (const c10::Error&) {
    forgetAll(written);
    return false;
  }
  forEachTensor(written, markAssumed);
  return true;
}

bool tryRunning(const OperatorHandle& op,
                ArrayRef<IValue> arguments,
                ArrayRef<IValue> results,
                ArrayRef<IValue> written) {
  if (!canRunOnValues(op) || !areSmall(arguments) || !areSmall(results) || !areAll(arguments, isPlain) ||
      !areAll(results, isPlain)) {
    return false;
  }
  const bool has_value = hasTensor(arguments, hasValue);
  const auto is_worth_it = [has_value](const Tensor& tensor) {
    return isDiscrete(tensor) || tensor.numel() == 1 || (has_value && tensor.numel() <= kMaxAssumedNumbers);
  };
  return areAll(results, is_worth_it) && areAll(written, is_worth_it) && runAssumed(op, arguments, results, written);
}

// A draw of integers, such as a permutation.
bool tryDrawing(const OperatorHandle& op,
                ArrayRef<IValue> arguments,
                ArrayRef<IValue> results,
                ArrayRef<IValue> written) {
  static const at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/0);
  if (!op.hasTag(at::Tag::nondeterministic_seeded) || !takesGenerator(op) || !areSmall(arguments) ||
      !areAll(arguments, isDiscrete) || !areAll(results, isDiscrete)) {
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

// NOTE [Assumed indices]
//
// What sorting, selecting and sampling make are positions in a dimension of n elements. They are taken to be n/2,
// n/2 + 1, and so on, modulo n: none occurs twice in a row of at most n; they reach all experts of a router alike; and
// the first tokens, which often mean the end of a text, come last.
constexpr std::array<std::string_view, 11> kMakeIndices{
    "aten::topk",   "aten::sort",     "aten::argmax", "aten::argmin",      "aten::max",       "aten::min",
    "aten::median", "aten::kthvalue", "aten::mode",   "aten::multinomial", "aten::nanmedian",
};

bool tryIndices(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!isAmong(kMakeIndices, op.schema().name()) || hasOut(op) || hasValue(arguments.front().toTensor())) {
    return false;
  }
  const Tensor& source = arguments.front().toTensor();
  const Tensor& indices = results.back().toTensor();
  if (indices.scalar_type() != c10::kLong || (results.size() == 1 && source.scalar_type() == c10::kLong) ||
      !isSmall(indices)) {
    return false;
  }
  const int position = findArgument(op.schema(), "dim");
  const IValue dim = position < 0 ? IValue(-1) : arguments[static_cast<std::size_t>(position)];
  const bool is_of_all = !dim.isInt() || source.dim() == 0;
  const int64_t count = std::max<int64_t>(is_of_all ? source.numel() : source.size(dim.toInt()), 1);
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const bool has_dim = !is_of_all && indices.dim() == source.dim();
  std::vector<int64_t> sizes = indices.sizes().vec();
  if (has_dim) {
    const auto wrapped = static_cast<std::ptrdiff_t>(c10::maybe_wrap_dim(dim.toInt(), source.dim()));
    std::rotate(sizes.begin() + wrapped, sizes.begin() + wrapped + 1, sizes.end());
  }
  Tensor values = at::arange(indices.numel(), c10::kLong).add_(count / 2).remainder_(count).view(sizes);
  setValue(indices, has_dim ? values.movedim(-1, dim.toInt()) : values, ValueKind::kAssumed);
  return true;
}

// Returns one element that stands for all of `tensor`, or an undefined tensor if its elements differ.
Tensor elementFor(const Tensor& tensor) {
  if (const Tensor element = eachElementOf(tensor); element.defined()) {
    return element.expand(std::vector<int64_t>(static_cast<std::size_t>(tensor.dim()), 1));
  }
  const Tensor value = isPlain(tensor) ? valueOf(tensor, ValueKind::kAssumed) : Tensor{};
  if (value.defined()) {
    return value.numel() == 1 ? value : Tensor{};
  }
  const std::vector<int64_t> one(static_cast<std::size_t>(tensor.dim()), 1);
  if (!isSmall(tensor) && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    return at::full(one, kOrdinaryInteger, at::TensorOptions(tensor.scalar_type()));
  }
  return defaults(tensor, one);
}

bool isWhetherAny(const OperatorHandle& op) {
  return op.schema().name() == "aten::any" || op.schema().name() == "aten::all";
}

// Truth values of tensors that are too large to compute with.
bool tryOneElement(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const bool makes_truth = results.size() == 1 && results.front().isTensor() &&
                           results.front().toTensor().scalar_type() == c10::kBool && canRunOnValues(op);
  if (!makes_truth || hasOut(op) || !(op.hasTag(at::Tag::pointwise) || isWhetherAny(op))) {
    return false;
  }
  const auto has_element = [](const Tensor& tensor) { return elementFor(tensor).defined(); };
  if (!areAll(arguments, has_element)) {
    return false;
  }
  try {
    const Stack value = runOn(op, arguments, elementFor);
    setEachElement(results.front().toTensor(), value.front().toTensor().clone());
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

// How many elements of a large mask count.
bool trySumOfMask(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const std::string& name = op.schema().name();
  if (name != "aten::sum" && name != "aten::count_nonzero") {
    return false;
  }
  const Tensor& counts = results.front().toTensor();
  const Tensor& mask = arguments.front().toTensor();
  const Tensor element = mask.scalar_type() == c10::kBool ? elementFor(mask) : Tensor{};
  if (!element.defined()) {
    return false;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const int64_t each = mask.numel() / std::max<int64_t>(counts.numel(), 1);
  setEachElement(counts, at::full({}, element.item().toBool() ? each : 0, at::TensorOptions(counts.scalar_type())));
  return true;
}

// Gradients have no infinities. The operator unscales them, so it cannot be run on what is known of `found_inf` alone.
bool tryFindingInfinities(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (op.schema().name() != "aten::_amp_foreach_non_finite_check_and_unscale_") {
    return false;
  }
  forgetValues(arguments.front());
  const Tensor& found = arguments[1].toTensor();
  if (hasValue(found)) {
    markAssumed(found);
  } else {
    setValue(found, at::full(found.sizes(), 0, at::TensorOptions(found.scalar_type()).device(c10::kCPU)),
             ValueKind::kAssumed);
  }
  return true;
}

}  // namespace

void setAssumptions(Assumptions* assumptions) noexcept {
  assumptions_in_use = assumptions;
}

bool assumesValues() noexcept {
  return assumptions_in_use != nullptr;
}

Tensor assumedValueOf(const Tensor& fake) {
  const Tensor value = valueOf(fake, ValueKind::kAssumed);
  return value.defined() ? value : defaults(fake, fake.sizes());
}

void assumeValue(const Tensor& fake, const Tensor& value) {
  if (!hasValue(fake) && fake.has_storage()) {
    makeBytes(fake, ValueKind::kAssumed);
  }
  markAssumed(fake);  // all of the storage, also what was unknown beside known parts
  if (const Tensor assumed = valueOf(fake, ValueKind::kAssumed); assumed.defined()) {
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    assumed.copy_(value);
  }
}

std::optional<int64_t> assumedCount(const OperatorHandle& op, const Tensor& mask, Noting noting) {
  Assumptions* const assumptions = assumptions_in_use;
  if (assumptions == nullptr || isRecording()) {
    return std::nullopt;
  }
  const Tensor value = valueOf(mask, ValueKind::kAssumed);
  const Tensor element = eachElementOf(mask);
  const int64_t all = element.defined() && countNonzero(element) == 0 ? 0 : mask.numel();
  const int64_t count = value.defined() ? countNonzero(value) : all;
  if (noting == Noting::kNotes) {
    assumptions->note(op, c10::str(count, " of ", mask.numel(), " elements"));
  }
  return count;
}

std::optional<bool> assumeEqual(const OperatorHandle& op, const Tensor& a, const Tensor& b) {
  Assumptions* const assumptions = assumptions_in_use;
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
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    computed = is_exact ? first.equal(second) : at::allclose(first, second);
  }
  return assumptions->answer(op, c10::kBool, computed) != 0;
}

bool mayBeAssumed(ArrayRef<IValue> results) {
  return assumesValues() &&
         hasTensor(results, [](const Tensor& result) { return isDiscrete(result) || result.numel() == 1; });
}

bool assumeResults(const OperatorHandle& op,
                   ArrayRef<IValue> arguments,
                   ArrayRef<IValue> results,
                   ArrayRef<IValue> written) {
  if (!assumesValues() || isRecording() || !isPyTorchs(op)) {
    return false;
  }
  return tryFindingInfinities(op, arguments) || tryIndices(op, arguments, results) ||
         tryDrawing(op, arguments, results, written) || tryRunning(op, arguments, results, written) ||
         tryOneElement(op, arguments, results) || trySumOfMask(op, arguments, results);
}

namespace {

// Returns the fakes that take the place of `values`, the results of a call whose shapes depend on values.
Stack fakesWithValues(ArrayRef<IValue> values, c10::Device device) {
  Stack fakes(values.begin(), values.end());
  mapTensors(fakes, fakes.size(), [device](const Tensor& value) {
    Tensor fake = fakeOn(device, value);
    setValue(fake, value, ValueKind::kAssumed);
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

// Returns the results of a call whose shapes depend on values, all of which are small, or nothing.
std::optional<Stack> resultsOfSmall(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  if (!isPyTorchs(op) || hasOut(op) || !areSmall(arguments) || !areAll(arguments, isPlain)) {
    return std::nullopt;
  }
  try {
    const Stack values = runLimited(op, arguments, assumedValueOf);
    assumptions.note(op, shapesOf(values));
    return fakesWithValues(values, arguments.front().toTensor().device());
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// The same for the positions, or the elements, that a large mask selects.
std::optional<Stack> resultsOfMask(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const std::string& name = op.schema().name();
  const bool is_selection = name == "aten::masked_select";
  if ((!is_selection && name != "aten::nonzero") || hasOut(op)) {
    return std::nullopt;
  }
  const Tensor& self = arguments.front().toTensor();
  const auto count = assumedCount(op, is_selection ? arguments[1].toTensor() : self);
  const FakeFactoriesGuard guard;
  return Stack{is_selection ? at::empty({*count}, self.options())
                            : at::empty({*count, self.dim()}, self.options().dtype(c10::kLong))};
}

// The same for a packed sequence.
std::optional<Stack> resultsOfLengths(const OperatorHandle& op, ArrayRef<IValue> arguments, Assumptions& assumptions) {
  auto results = resultsBySizes(op, arguments, assumedValueOf);
  if (results) {
    assumptions.note(op, shapesOf(*results));
    forEachTensor(ArrayRef<IValue>(*results), markAssumed);
  }
  return results;
}

// Returns the number that `op` reads, or nothing if it reads something else.
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
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const auto computed = value.defined() ? std::optional{value.item().toDouble()} : std::nullopt;
  const double answer = assumptions.answer(op, read.scalar_type(), computed);
  return value.defined() ? value.item() : numberOf(read.scalar_type(), answer);
}

}  // namespace

std::optional<Stack> assumeValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  Assumptions* const assumptions = assumptions_in_use;
  if (assumptions == nullptr || isRecording()) {
    return std::nullopt;
  }
  if (auto number = numberRead(op, arguments, *assumptions)) {
    return Stack{*std::move(number)};
  }
  if (auto results = resultsOfSmall(op, arguments, *assumptions)) {
    return results;
  }
  if (auto results = resultsOfMask(op, arguments)) {
    return results;
  }
  return resultsOfLengths(op, arguments, *assumptions);
}

}  // namespace torchext
