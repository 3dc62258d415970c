#include <exception>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/hash.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/cache/call_key.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/allocation_limit.h"
#include "../support/registrations.h"
#include "../trials/trials.h"
#include "assumed_values.h"
#include "follow_values.h"
#include "known_values.h"

namespace torchext {

namespace {

// NOTE [Errors about known values]
//
// Real kernels check values: positions, lengths, pivots, divisors, probabilities. The trials of NOTE [Errors of real
// tensors] have no values, and their outcomes are remembered for all values. So a call that reads known integers is
// tried out with these values as well, once for each set of values:
//
//   * The error is raised if the same call passes with other values, and if it occurs with all fills of unknown
//   tensors.
//   * Random operators check floating-point values too, so those count for them.
//   * A trial ends without a decision when its kernel allocates a large result. Calls that write a large tensor, and
//     kernels that trust their integers, are not tried out.
//   * CUDA kernels do not raise such errors. Their assertions end the program later.

// The largest result that a trial allocates.
constexpr std::size_t kMostCheckedBytes = std::size_t{1} << 22U;

// The kernels of these operators read at the positions or lengths that they are given.
const OperatorSet trustsIntegers{"read memory at positions that they do not check",
                                 {"aten::_ctc_loss", "aten::ctc_loss"}};

// Returns true if the kernel checks the values that it reads. `segment_reduce()` does, except with `unsafe`.
bool checksItsValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const Trust trust = trustOf(op);
  if (trust == Trust::kSegments) {
    const IValue& unsafe = argumentNamed(op, arguments, "unsafe");
    return unsafe.isBool() && !unsafe.toBool();
  }
  return trust == Trust::kNothing && !trustsIntegers(op);
}

// Returns true for an operator whose kernel may check values, unless a trial with values could be slow or unsafe.
bool mayCheckValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (!checksItsValues(op, arguments)) {
    return false;
  }
  bool are_all_integers = true;
  bool is_possible = true;
  for (const auto i : c10::irange(arguments.size())) {
    const bool is_written = isWritten(op.schema().arguments()[i]);
    forEachTensor(arguments[i], [&](const Tensor& tensor) {
      are_all_integers = are_all_integers && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
      // Stand-ins of written tensors take memory that the limit of allocations does not count.
      is_possible = is_possible && tensor.is_cpu() && (!is_written || tensor.nbytes() <= kMostCheckedBytes);
    });
  }
  // Elementwise operators only check divisors, and only those of integers. Products of integers do not check values.
  return is_possible && (are_all_integers ? countElements(arguments, {}) <= kCheap : !op.hasTag(at::Tag::pointwise));
}

// Returns true for a tensor of integers, whose values kernels may check, except a number that PyTorch has wrapped.
bool mayBeChecked(const Tensor& tensor) noexcept {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
         !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

std::size_t hashOf(const Tensor& value) {
  const Tensor dense = value.contiguous();
  return std::hash<std::string_view>{}({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()});
}

// The arguments of a call that an operator may check.
struct CheckedValues {
  CheckedValues(const OperatorHandle& op, ArrayRef<IValue> arguments, const TensorMapper& value_of) {
    const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    for (const auto i : c10::irange(arguments.size())) {
      if (op.schema().arguments()[i].is_out()) {
        continue;
      }
      forEachTensor(arguments[i], [&](const Tensor& tensor) {
        if (mayBeChecked(tensor) || (is_random && !tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
          const Tensor value = value_of(tensor);
          are_some_known = are_some_known || value.defined();
          are_all_known = are_all_known && value.defined();
          hash = c10::hash_combine(hash, value.defined() ? hashOf(value) : 0);
        }
      });
    }
  }

  bool are_some_known = false;
  bool are_all_known = true;
  std::size_t hash = 0;  // of the known ones
};

bool passesWithOtherValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const TensorMapper unknown = [](const Tensor& /*tensor*/) { return Tensor{}; };
  return expectsValues(op) || passes(op, arguments, {Fill::kIdentity, Dtypes::kKept, {}, std::nullopt, &unknown});
}

// Raises the error of real tensors that results from known values. `value_of` returns the value of a tensor, or an
// undefined tensor. The call must have been accepted with unknown values.
void refuseKnownValues(const OperatorHandle& op, ArrayRef<IValue> arguments, const TensorMapper& value_of) {
  if (!mayCheckValues(op, arguments)) {
    return;
  }
  const Trial trial;
  const CheckedValues values{op, arguments, value_of};
  if (!values.are_some_known || !canBeTriedOut(op, arguments, values.are_all_known)) {
    return;
  }
  const CallKey key{op, arguments.vec()};
  const std::size_t hash = c10::hash_combine(key.hash(), values.hash);
  if (key.isComplete() && hasPassed(hash)) {
    return;
  }
  const AllocationLimit limit{kMostCheckedBytes};
  const Outcome outcome = outcomeOf(op, arguments, {Fill::kIdentity, Dtypes::kKept, {}, std::nullopt, &value_of});
  if (outcome.refusal && passesWithOtherValues(op, arguments)) {
    std::rethrow_exception(outcome.refusal->error);
  }
  if (key.isComplete()) {
    rememberPassed(hash);
  }
}

// NOTE [Known values]
bool readsKnownValues(const OperatorHandle& op, const Stack& stack) {
  return needsValues(op, stack) && areValuesKnown(op, argumentsOf(op, stack)) &&
         op.schema().name() != "aten::_pack_padded_sequence";  // its result is on the CPU: follow_values.cpp
}

// NOTE [Errors about known values]
void refuseValues(const OperatorHandle& op, Arguments arguments, Arguments results, const ArgumentFacts& facts) {
  const bool may_be_known = facts.has_fake && (facts.has_value || facts.has_checked) && !isRecording();
  const bool runs_on_values = canRunOnValues(op) && areSmall(results) && areValuesKnown(op, arguments);
  if (!may_be_known || runs_on_values) {
    return;
  }
  try {
    refuseKnownValues(op, arguments, [](const Tensor& tensor) { return valueOf(tensor); });
  } catch (const std::exception&) {
    forgetValues(writtenBy(op, arguments));  // the real kernel has written a part
    throw;
  }
}

bool areMade(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results, bool has_fake) {
  return areSmall(results) && !onlyAllocates(op) &&
         (!has_fake || isFactory(op, arguments) || isAboutNumbers(arguments) || overwritesArgument(op, 0));
}

// Follows values if an argument has some, or if the call may make or write some without reading any.
void follow(const OperatorHandle& op,
            ArrayRef<IValue> arguments,
            ArrayRef<IValue> results,
            const ArgumentFacts& facts,
            bool are_made) {
  refuseValues(op, arguments, results, facts);
  if (facts.has_value || are_made || (!isRecording() && mayBeAssumed(results))) {
    followValues(op, arguments, results);
  }
}

// Runs calls on known values.
class ValuesHandler final : public CallHandler {
 public:
  constexpr ValuesHandler() = default;

  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& facts) const override {
    if (!facts.has_value || !readsKnownValues(op, stack)) {
      return std::nullopt;
    }
    return HandledCall{nullptr, HandledCall::Effect::kComputes, "runs on the values, which are known"};
  }

  void run(const OperatorHandle& op, c10::DispatchKeySet /*below*/, Stack& stack) const override {
    const OwnComputation own;
    const std::size_t count = op.schema().arguments().size();
    const auto arguments = topOf(stack, count);
    const c10::Device device = outputDevice(op, stack);
    std::vector<Tensor> outs;
    for (const auto i : c10::irange(count)) {
      if (op.schema().arguments()[i].is_out()) {
        outs.push_back(arguments[i].toTensor());
      }
    }
    Stack values = runOnValues(op, arguments);
    std::size_t number = 0;
    mapTensors(values, values.size(), [&](const Tensor& value) {
      Tensor fake = number < outs.size() ? outs[number++] : fakeOn(device, value);
      if (fake.sizes() != value.sizes()) {
        fake.resize_(value.sizes());
      }
      writeValue(fake, value);
      return fake;
    });
    countCall(op, arguments, /*scratch=*/nullptr, values, takeUncounted());
    replaceTop(stack, count, std::move(values));
  }
};

}  // namespace

void registerFakeValues() {
  FakeValues& values = hooks().values;
  values.has = &hasValue;
  values.mayBeChecked = &mayBeChecked;
  values.areAssumed = &assumesValues;
  values.prepare = &expandMasks;
  values.areRead = &readsKnownValues;
  values.areMade = &areMade;
  values.follow = &follow;
  values.answer = &answerForValues;
  values.share = &shareBytes;
  values.copy = [](const Tensor& fake, const Tensor& source) { copyValue(fake, source); };
  values.forget = [](const IValue& fakes) { forgetValues(fakes); };
  static constexpr ValuesHandler handler;
  hooks().handlers.add(&handler);
}

}  // namespace torchext
