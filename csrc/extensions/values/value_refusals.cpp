#include "value_refusals.h"

#include <exception>
#include <functional>
#include <string_view>

#include <ATen/core/enum_tag.h>
#include <c10/util/hash.h>
#include <c10/util/irange.h>

#include "../../core/fake/cache/call_key.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/sizes.h"
#include "../support/allocation_limit.h"
#include "../trials/trials.h"
#include "../trials/trust.h"

namespace torchext {

namespace {

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

std::size_t hashOf(const Tensor& value) {
  const Tensor dense = value.contiguous();
  return std::hash<std::string_view>{}({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()});
}

// The arguments of a call that an operator may check.
struct CheckedValues {
  CheckedValues(const OperatorHandle& op, ArrayRef<IValue> arguments, const TensorMapper& value_of);

  bool are_some_known = false;
  bool are_all_known = true;
  std::size_t hash = 0;  // of the known ones
};

CheckedValues::CheckedValues(const OperatorHandle& op, ArrayRef<IValue> arguments, const TensorMapper& value_of) {
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

bool passesWithOtherValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const TensorMapper unknown = [](const Tensor& /*tensor*/) { return Tensor{}; };
  return expectsValues(op) || passes(op, arguments, {Fill::kIdentity, Dtypes::kKept, {}, std::nullopt, &unknown});
}

}  // namespace

bool mayBeChecked(const Tensor& tensor) noexcept {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
         !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

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

}  // namespace torchext
