#include "assumed_values.h"

#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/full.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "assumed_elements.h"
#include "assumed_indices.h"
#include "assumed_masks.h"
#include "assumptions.h"
#include "known_bytes.h"
#include "known_values.h"

namespace torchext {

namespace {

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
    forgetAll(written);
    return false;
  }
  forEachTensor(written, [kind](const Tensor& tensor) { markAssumed(tensor, kind); });
  return true;
}

ValueKind kindOfAll(ArrayRef<IValue> values) {
  ValueKind kind = ValueKind::kKnown;
  forEachTensor(values, [&kind](const Tensor& tensor) { kind = isFake(tensor) ? kind | kindOf(tensor) : kind; });
  return kind;
}

bool assumeByRunning(const OperatorHandle& op,
                     ArrayRef<IValue> arguments,
                     ArrayRef<IValue> results,
                     ArrayRef<IValue> written) {
  const bool is_routed = isRouted(kindOfAll(arguments));
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
