#include "assumptions.h"

#include <atomic>

#include <ATen/ops/full.h>
#include <c10/core/Scalar.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/stack_utils.h"

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

}  // namespace torchext
