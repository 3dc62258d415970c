#include "value_shortcuts.h"

#include <array>
#include <string_view>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../support/autograd.h"
#include "factories_of_call.h"
#include "known_values.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// Operators that read values. The functions are PyTorch's: they call `isTensorSubclassLike()`, or check the keys,
// before reading.
constexpr std::array kReadValues{
    "cross_entropy_loss",   // cross_entropy_loss_label_smoothing(): which weights count
    "masked_fill.Tensor",   // masked_fill_backward(): selects the masked elements
    "masked_fill_.Tensor",  // the same
    "nanquantile",          // quantile_compute(): are the quantiles between 0 and 1?
    "nanquantile.scalar",   // selects one quantile in memory, without calling the other overload: 2.14
    "quantile",             // like nanquantile
    "quantile.scalar",      // the same
};

// Nodes whose formulas look for special values.
constexpr std::array<std::string_view, 7> kLookForSpecialValues{
    "CumprodBackward0",    // cumprod_backward(): is there a zero?
    "MaxBackward1",        // evenly_distribute_backward(): is the result NaN?
    "MedianBackward0",     // the same
    "MinBackward1",        // the same
    "NanmedianBackward0",  // the same
    "ProdBackward0",       // prod_backward(): where are zeros?
    "ProdBackward1",       // the same
};

bool isPlainFake(const Tensor& tensor) {
  return isFake(tensor) && tensor.has_storage() && !tensor.key_set().has(DispatchKey::DeferredInit);
}

// Returns true for quantiles whose values are known: these are all that is read.
bool areKnownQuantiles(const c10::Argument& argument, const c10::IValue& value) {
  return argument.name() == "q" && value.isTensor() && knownValueOf(value.toTensor()).defined();
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
    c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!isWritten(arguments[i]) && !areKnownQuantiles(arguments[i], value)) {
      value = mapTensors(
          value, [](const Tensor& tensor) { return isPlainFake(tensor) ? aliasWithoutValues(tensor) : tensor; });
    }
  }
  const FactoriesOfCall guard{topOf(*stack, arguments.size())};
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

}  // namespace

void registerValueShortcuts(torch::Library& library) {
  implement<&readsValues>(library, kReadValues);
}

bool runsNodeForSpecialValues() {
  return isAmong(kLookForSpecialValues, nameOfRunningNode());
}

}  // namespace torchext
