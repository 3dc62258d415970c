// NOTE [Shortcuts that read values]
//
// Some kernels and gradient formulas read values to find a shortcut.
//
// The formulas of `prod`, `cumprod`, `max`, `min` and `median` check for zeros or NaNs. For fakes the check returns
// false, as in most real runs. So gradients have the strides of these runs, and the formula needs as much memory.
//
// Other kernels and formulas do not read if `isTensorSubclassLike()` (TensorSubclassLikeUtils.h) returns true, which
// means that a tensor may have no memory. This is decided by dispatch keys, and fakes carry those of a real tensor. If
// fakes always carried such a key, all other callers of that function would take another path than for real tensors,
// and leave other nodes in the graph (`reshape` would). So only aliases carry one: the fake arguments of the operators
// in `kReadValues` are replaced by aliases that also carry the backend bit of the meta device. A formula saves the
// alias, and finds the bit when it runs. The operator's results do not carry it.
//
// Deferred tensors have values, and take the path of real tensors.

#include "gradient_formulas.h"

#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/irange.h>
#include <pthread.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../support/autograd.h"
#include "../values/known_values.h"
#include "composites.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

FactoriesOfCall::FactoriesOfCall(ArrayRef<IValue> arguments) {
  bool has_fake = false;
  bool has_deferred = false;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (isFake(tensor)) {
      has_fake = true;
      has_deferred = has_deferred || tensor.key_set().has(DispatchKey::DeferredInit);
    }
  });
  if (has_deferred) {
    deferred_.emplace(DispatchKey::DeferredInit);
  } else if (has_fake) {
    fake_.emplace();
  }
}

namespace {

// The formula that runs on this thread, or null.
thread_local const RunningFormula* running = nullptr;

// Whether this thread runs an operator that computes the tangent of its result.
thread_local bool is_in_tangent_formula = false;

}  // namespace

struct RunningFormula final : at::ObserverContext {
  explicit RunningFormula(ArrayRef<IValue> gradients) : factories{gradients} {
    running = this;
  }
  C10_DISABLE_COPY_AND_ASSIGN(RunningFormula);
  ~RunningFormula() override {
    running = outer;
  }

  const RunningFormula* outer = running;
  const c10::impl::LocalDispatchKeySet keys_before = c10::impl::tls_local_dispatch_key_set();
  FactoriesOfCall factories;
};

namespace {

std::atomic<bool> are_fakes_wanted{false};

void observe(bool are_wanted_now);

// The context lives until the node has run.
std::unique_ptr<at::ObserverContext> beforeNode(const at::RecordFunction& node) {
  if (!are_fakes_wanted) {
    observe(false);
    return nullptr;
  }
  if (!isRunningPyTorchsNode()) {
    return nullptr;
  }
  const auto inputs = node.inputs();
  return std::make_unique<RunningFormula>(ArrayRef<IValue>(inputs.data(), inputs.size()));
}

// Includes exactly those of the two keys that are in `keys`.
void include(DispatchKeySet keys) {
  for (const DispatchKey key : {DispatchKey::Fake, DispatchKey::DeferredInit}) {
    c10::impl::tls_set_dispatch_key_included(key, keys.has(key));
  }
}

// Enables or disables the observer. Afterwards each thread rereads the list of observers in its next operator, under a
// PyTorch mutex that may be locked in a forked child. So call this only on a change.
void observe(bool are_wanted_now) {
  static bool is_observing = false;
  const Locked lock{LockRank::kObserver};
  if (is_observing == are_wanted_now || are_fakes_wanted != are_wanted_now) {
    return;  // another thread has done this, or has changed `are_fakes_wanted` since
  }
  is_observing = are_wanted_now;
  static const at::CallbackHandle handle = at::addGlobalCallback(
      at::RecordFunctionCallback{&beforeNode}.needsInputs(true).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  if (are_wanted_now) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

// Rereads the list before a fork. The child would find the mutex locked if another thread held it then.
void readObservers() {
  static_cast<void>(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION));
}

[[maybe_unused]] const bool reads_observers_before_forks = pthread_atfork(&readObservers, nullptr, nullptr) == 0;

}  // namespace

bool isInGradientFormula() {
  return running != nullptr && isRunningPyTorchsNode();
}

OutsideOfFormula::OutsideOfFormula()
    : formula_{running},
      was_in_tangent_formula_{is_in_tangent_formula},
      included_{c10::impl::tls_local_dispatch_key_set().included_} {
  if (formula_ != nullptr) {
    include(formula_->keys_before.included_);
  }
  running = nullptr;
  is_in_tangent_formula = false;
}

OutsideOfFormula::~OutsideOfFormula() {
  if (formula_ != nullptr) {
    include(included_);
  }
  running = formula_;
  is_in_tangent_formula = was_in_tangent_formula_;
}

void makeGradientsFake(bool are_wanted_now) {
  are_fakes_wanted = are_wanted_now;
  if (are_wanted_now) {
    observe(true);
  }
}

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

// Returns true for quantiles whose values are known: these are all that is read.
bool areKnownQuantiles(const c10::Argument& argument, const IValue& value) {
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

void shortcutKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (const auto i : c10::irange(arguments.size())) {
    IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!isWritten(arguments[i]) && !areKnownQuantiles(arguments[i], value)) {
      value = mapTensors(value, [](const Tensor& tensor) {
        return isUndeferredFake(tensor) && tensor.has_storage() ? aliasWithoutValues(tensor) : tensor;
      });
    }
  }
  callWithFactoriesOfCall(op, keys, stack);
}

// The formula for tangents of `prod` (forward mode) calls `prod_backward()`.
void prodKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const bool has_tangent = argumentsOf(op, *stack)[0].toTensor()._fw_grad(/*level=*/0).defined();
  const auto end = c10::make_scope_exit(
      [previous = std::exchange(is_in_tangent_formula, has_tangent)] { is_in_tangent_formula = previous; });
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// Whether a formula reads `self`, which has no values, only to find zeros or NaNs: NOTE [Shortcuts that read values].
// Formulas compare before they read, so they read truth values, or a number of elements.
bool isCheckedForSpecialValues(const Tensor& self) {
  const bool may_be_check = self.scalar_type() == c10::kBool || self.scalar_type() == c10::kLong;
  return may_be_check && isUndeferredFake(self) && !hasValue(self) &&
         (is_in_tangent_formula || (isInGradientFormula() && isAmong(kLookForSpecialValues, nameOfRunningNode())));
}

// `torch.tensor([x, y])` reads its elements with our keys excluded (`internal_new_from_data()`, tensor_new.cpp).
void localScalarKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = argumentsOf(op, *stack)[0].toTensor();
  if (isCheckedForSpecialValues(self)) {
    replaceArguments(op, *stack, c10::Scalar{false});
    return;
  }
  const bool calls_fake_directly =
      c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Fake) && isUndeferredFake(self) && isSmall(self);
  op.redispatchBoxed(calls_fake_directly ? DispatchKeySet{DispatchKey::Fake} : keys & kBelowComposites, stack);
}

// `prod_backward()` reads the positions of zeros.
void nonzeroKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = argumentsOf(op, *stack)[0].toTensor();
  if (isCheckedForSpecialValues(self)) {
    replaceArguments(op, *stack, self.new_empty({0, self.dim()}, c10::kLong));
    return;
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

}  // namespace

void registerValueShortcuts(torch::Library& library) {
  implement<&shortcutKernel>(library, kReadValues);
  implement<&localScalarKernel>(library, {"_local_scalar_dense"});
  implement<&nonzeroKernel>(library, {"nonzero"});
  implement<&prodKernel>(library, {"prod", "prod.dim_int"});
}

}  // namespace torchext
