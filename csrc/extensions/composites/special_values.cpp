#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/fake_tensor.h>

#include "../values/known_values.h"
#include "../values/value_shortcuts.h"
#include "composite_kernels.h"
#include "gradient_factories.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// The formula for tangents of `prod` (forward mode) calls `prod_backward()`.
void prodKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor& self = argumentsOf(op, *stack)[0].toTensor();
  const TangentFormula formula{self._fw_grad(/*level=*/0).defined()};
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// Whether a formula reads `self`, which has no values, only to find zeros or NaNs: NOTE [Shortcuts that read values].
// Formulas compare before they read, so they read truth values, or a number of elements.
bool isCheckedForSpecialValues(const Tensor& self) {
  const bool may_be_check = self.scalar_type() == c10::kBool || self.scalar_type() == c10::kLong;
  return may_be_check && isUndeferredFake(self) && !hasValue(self) &&
         (isInTangentFormula() || (isInGradientFormula() && runsNodeForSpecialValues()));
}

// `torch.tensor([x, y])` reads its elements with our keys excluded (`internal_new_from_data()`, tensor_new.cpp).
void localScalarKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = argumentsOf(op, *stack)[0].toTensor();
  if (isCheckedForSpecialValues(self)) {
    torch::jit::drop(*stack, 1);
    torch::jit::push(*stack, c10::Scalar{false});
    return;
  }
  const bool calls_fake_directly = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Fake) && isFake(self) &&
                                   !self.key_set().has(DispatchKey::DeferredInit) && isSmall(self);
  op.redispatchBoxed(calls_fake_directly ? DispatchKeySet{DispatchKey::Fake} : keys & kBelowComposites, stack);
}

// `prod_backward()` reads the positions of zeros.
void nonzeroKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = argumentsOf(op, *stack)[0].toTensor();
  if (isCheckedForSpecialValues(self)) {
    torch::jit::drop(*stack, 1);
    torch::jit::push(*stack, self.new_empty({0, self.dim()}, c10::kLong));
    return;
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

}  // namespace

void registerSpecialValues(torch::Library& library) {
  implement<&localScalarKernel>(library, {"_local_scalar_dense"});
  implement<&nonzeroKernel>(library, {"nonzero"});
  implement<&prodKernel>(library, {"prod", "prod.dim_int"});
}

}  // namespace torchext
