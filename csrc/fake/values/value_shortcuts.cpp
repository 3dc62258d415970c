#include "value_shortcuts.h"

#include <array>
#include <optional>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/cumprod.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../support/stack_utils.h"
#include "../../torch_internals/autograd.h"
#include "../../torch_internals/open_tensor_impl.h"
#include "../storage/fake_factories.h"
#include "../storage/fake_keys.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// Operators that read values. The functions are PyTorch's: they call `isTensorSubclassLike()`, or check the keys,
// before reading.
constexpr std::array kReadValues{
    "cross_entropy_loss",   // cross_entropy_loss_label_smoothing(): which weights count
    "cumprod",              // cumprod_backward(): is there a zero?
    "masked_fill.Tensor",   // masked_fill_backward(): selects the masked elements
    "masked_fill_.Tensor",  // the same
    "max",                  // evenly_distribute_backward(): is the result NaN?
    "median",               // the same
    "min",                  // the same
    "nanmedian",            // the same
    "nanquantile",          // quantile_compute(): are the quantiles between 0 and 1?
    "nanquantile.scalar",   // selects one quantile in memory, without calling the other overload: 2.14
    "prod",                 // prod_backward(): where are zeros?
    "prod.dim_int",         // the same
    "quantile",             // like nanquantile
    "quantile.scalar",      // the same
};

bool isPlainFake(const Tensor& tensor) {
  return isFake(tensor) && tensor.has_storage() && !tensor.key_set().has(DispatchKey::DeferredInit);
}

// Returns an alias of `tensor` that is equivalent for autograd: an input of the same node, with the same version and
// the same tangent.
Tensor aliasWithoutValues(const Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::impl::ExcludeDispatchKeyGuard no_modes{DispatchKey::Python};
  auto alias = impl.shallow_copy_and_detach(impl.version_counter(), impl.allow_tensor_metadata_change());
  OpenTensorImpl::keysOf(*alias) = alias->key_set() | DispatchKeySet{kWithoutValues};
  if (tensor.requires_grad()) {
    alias->set_autograd_meta(autogradMetaOfAlias(alias.get(), tensor));
  }
  Tensor result{std::move(alias)};
  if (const Tensor& tangent = tensor._fw_grad(/*level=*/0); tangent.defined()) {
    result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

void readsValues(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (const auto i : c10::irange(arguments.size())) {
    if (!isWritten(arguments[i])) {
      c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
      value = mapTensors(
          value, [](const Tensor& tensor) { return isPlainFake(tensor) ? aliasWithoutValues(tensor) : tensor; });
    }
  }
  const FactoriesOfCall guard{topOf(*stack, arguments.size())};
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// The formula of the in-place operator reads autograd's copy of its argument, which is not one of our aliases.
Tensor& cumprodInPlace(DispatchKeySet keys, Tensor& self, int64_t dim, std::optional<c10::ScalarType> dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::cumprod_", "")
                             .typed<Tensor&(Tensor&, int64_t, std::optional<c10::ScalarType>)>();
  if (isPlainFake(self) && self.requires_grad() && at::GradMode::is_enabled()) {
    return self.copy_(self.clone().cumprod(dim, dtype));
  }
  return op.redispatch(keys & kBelowComposites, self, dim, dtype);
}

}  // namespace

void registerValueShortcuts(torch::Library& library) {
  for (const char* name : kReadValues) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&readsValues>());
  }
  library.impl("cumprod_", &cumprodInPlace);
}

}  // namespace torchext
