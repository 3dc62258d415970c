#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/registrations.h"
#include "assumed_values.h"
#include "assumptions.h"
#include "follow_values.h"
#include "known_values.h"
#include "value_refusals.h"

namespace torchext {

namespace {

// NOTE [Known values]
bool readsKnownValues(const OperatorHandle& op, const Stack& stack) {
  return needsValues(op, stack) && areValuesKnown(op, argumentsOf(op, stack)) &&
         op.schema().name() != "aten::_pack_padded_sequence";  // its result is on the CPU: value_shapes.h
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
    forgetAll(writtenBy(op, arguments));  // the real kernel has written a part
    throw;
  }
}

void prepareMasks(const OperatorHandle& op, Stack& stack, bool is_prediction) {
  if (isMaskedIndexing(op, stack)) {
    expandMasks(op, stack, is_prediction ? Noting::kIsSilent : Noting::kNotes);
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

Tensor resizedTo(c10::IntArrayRef sizes, const Tensor& out) {
  if (!out.sizes().equals(sizes)) {
    out.resize_(sizes);
  }
  return out;
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
    const c10::Device device = DeviceRules(op, stack).outputDevice();
    std::vector<Tensor> outs;
    for (const auto i : c10::irange(count)) {
      if (op.schema().arguments()[i].is_out()) {
        outs.push_back(arguments[i].toTensor());
      }
    }
    Stack values = runOnValues(op, arguments);
    std::size_t number = 0;
    mapTensors(values, values.size(), [&](const Tensor& value) {
      Tensor fake = number < outs.size() ? resizedTo(value.sizes(), outs[number++]) : fakeOn(device, value);
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
  values.prepare = &prepareMasks;
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
