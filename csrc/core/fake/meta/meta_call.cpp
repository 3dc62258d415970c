#include "meta_call.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/irange.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/held_warnings.h"
#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../calls/errors.h"
#include "../calls/hidden_keys.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "../storage/fake_factories.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "../storage/storage_memory.h"
#include "device_rules.h"
#include "meta_kernel.h"
#include "recipe_builder.h"
#include "shadows.h"

namespace torchext {

using c10::DispatchKey;
using c10::Storage;
using c10::TensorImpl;

namespace {

// Meta kernels written in Python, and functions that complete results, call torch functions. These calls are internal,
// so they must not reach a TorchFunctionMode.
class NoTorchFunction {
 public:
  NoTorchFunction() : previous_{TorchFunctionTLS::get_disabled_state()} {
    TorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  C10_DISABLE_COPY_AND_ASSIGN(NoTorchFunction);
  ~NoTorchFunction() {
    TorchFunctionTLS::set_disabled_state(previous_);
  }

 private:
  using TorchFunctionTLS = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState previous_;
};

// While it lives, a fake implementation makes calls on fakes: NOTE [Fake implementations].
struct CallsOfImplementation {
  const c10::impl::ExcludeDispatchKeyGuard keys{kHiddenFromImplementations};
  const torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  const FakeFactoriesGuard factories;
  const ImplementationGuard implementation;
};

void checkCanBeFaked(const OperatorHandle& op, const Stack& stack) {
  if (lacksValues(op, stack)) {
    TORCHEXT_THROW(
        DataDependentError,
        c10::str("`", op.operator_name(),
                 "` needs the values of its arguments, but at least one is a fake tensor, which has none. Run "
                 "it on real tensors, or move it out of the code that runs on fake tensors."));
  }
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("`", op.operator_name(),
                            "` has no Meta kernel, so its result on fake tensors is unknown. Register one with "
                            "torch.library.register_fake(\"",
                            op.operator_name(), "\")."));
  }
}

// NOTE [Trials instead of Meta kernels]
//
// The results of a trial at the size of the call take precedence over those of the Meta kernel (NOTE [Correcting Meta
// kernels]), which then need not run. A trial does not reveal on which argument a view is, and some results have larger
// storages than they need (torchext/fake/meta_overrides.py), so all results must be new tensors.

// Runs one call according to its plan.
class MetaCall {
 public:
  MetaCall(const OperatorHandle& op, const Stack& called, CallTensors tensors, const MetaPlan& plan)
      : op_{op},
        called_{called},
        tensors_{tensors},
        plan_{plan},
        stack_(arguments().vec()),
        shadows_{runsOnFakes() ? Shadows::Kind::kFake : Shadows::Kind::kMeta} {}

  std::shared_ptr<ResultRecipe> describe();

  // After `describe()` has raised an error: the error, if it is that of real tensors, or null.
  const std::exception_ptr& refusal() const noexcept {
    return refusal_;
  }

 private:
  template <typename Check>
  auto recordRefusalOf(const Check& check);
  RealResults tryOut(TrialReason reason, Arguments meta_results = {});
  bool isTriedOutFirst() const;
  std::shared_ptr<ResultRecipe> describeWithoutMetaKernel(bool is_prepared, const std::exception& error);
  void convertArguments();
  IValue toShadow(const IValue& value, const c10::Argument& argument);
  void callMetaKernel();
  std::shared_ptr<ResultRecipe> describeOnZeros();
  void correctMetaResults(const RealResults& real);
  void refuseDtypes(c10::ArrayRef<IValue> results);
  bool needsSizes(const RealResults& real);
  Stack effects();
  void describeWritten(const RealResults& real, RecipeBuilder& recipe);
  void separateOutputs();
  std::shared_ptr<ResultRecipe> describeResults(RecipeBuilder&& recipe);

  c10::ArrayRef<IValue> arguments() const {
    return topOf(called_, op_.schema().arguments().size());
  }

  bool runsOnFakes() const {
    return plan_.kernel == MetadataKernel::kFake;
  }

  const OperatorHandle& op_;
  const Stack& called_;  // has the arguments on top
  const CallTensors tensors_;
  const MetaPlan& plan_;
  std::exception_ptr refusal_;
  Stack stack_;  // first the converted arguments, then the results
  Shadows shadows_;
  // The arguments whose data or metadata the operator writes.
  std::vector<Tensor> written_;
};

template <typename Check>
auto MetaCall::recordRefusalOf(const Check& check) {
  try {
    return check();
  } catch (const c10::Error&) {
    refusal_ = std::current_exception();
    throw;
  }
}

RealResults MetaCall::tryOut(TrialReason reason, Arguments meta_results) {
  return recordRefusalOf([&] { return hooks().trials.tryOut(reason, op_, arguments(), meta_results); });
}

bool MetaCall::isTriedOutFirst() const {
  return !plan_.refusal && plan_.kernel == MetadataKernel::kMeta && plan_.device.is_cpu() && declaresNoSharing(op_) &&
         !needsValues(op_, called_) && hasOnlyPythonMetaKernel(op_);
}

std::shared_ptr<ResultRecipe> MetaCall::describeResults(RecipeBuilder&& recipe) {
  return std::move(recipe).build(stack_, plan_.device, makesPinned(op_, arguments()));
}

std::shared_ptr<ResultRecipe> MetaCall::describe() {
  RealResults real;
  if (isTriedOutFirst()) {
    real = tryOut(TrialReason::kInsteadOfPython);
    if (real.are_new) {
      passOn(real.warnings);
      stack_ = real.values;
      return describeResults(RecipeBuilder{op_, tensors_, shadows_.pairs()});
    }
  }
  bool is_prepared = false;
  std::vector<c10::Warning> warnings;
  try {
    if (plan_.refusal) {
      std::rethrow_exception(plan_.refusal);
    }
    convertArguments();
    is_prepared = true;
    HeldWarnings held;
    callMetaKernel();
    warnings = held.consume();
  } catch (const DataDependentError&) {
    // The kernel computes the results unless it refuses.
    tryOut(TrialReason::kNeedsValues);
    throw;
  } catch (const std::exception& error) {
    auto recipe = interpreter().isInterrupt(error) ? nullptr : describeWithoutMetaKernel(is_prepared, error);
    if (recipe == nullptr) {
      throw;
    }
    return recipe;
  }
  if (real.values.empty() && !needsValues(op_, called_)) {  // stand-ins have no values
    real = tryOut(TrialReason::kMetaKernelAccepts, effects());
    if (needsSizes(real)) {
      RealResults of_its_size = tryOut(TrialReason::kMetaKernelRefuses);
      real = of_its_size.values.empty() ? std::move(real) : std::move(of_its_size);
    }
  }
  refuseDtypes(stack_);
  // Meta kernels omit some warnings and word others differently.
  const bool is_real = plan_.device.is_cpu() && real.has_sizes && !real.values.empty();
  passOn(is_real ? real.warnings : warnings);
  correctMetaResults(real);
  RecipeBuilder recipe{op_, tensors_, shadows_.pairs()};
  describeWritten(real, recipe);
  separateOutputs();
  return describeResults(std::move(recipe));
}

// NOTE [Dtypes that CUDA kernels refuse]
void MetaCall::refuseDtypes(c10::ArrayRef<IValue> results) {
  recordRefusalOf([&] { hooks().kernels.refuseDtypes(op_, arguments(), results, plan_.device); });
}

// Returns true if the operator resizes an argument, and neither the Meta kernel nor a smaller trial reveals its shape.
bool MetaCall::needsSizes(const RealResults& real) {
  const std::size_t first = op_.schema().returns().size();
  bool needs = false;
  for (const auto i : c10::irange(written_.size())) {
    needs = needs || (!real.has_sizes && first + i < real.values.size() && real.values[first + i].isTensor() &&
                      shadows_.of(written_[i]).sizes() == written_[i].sizes());
  }
  return needs;
}

// Returns the results and the changes of the written shadows, like `RealResults::values`.
Stack MetaCall::effects() {
  Stack effects = stack_;
  for (const Tensor& fake : written_) {
    const Tensor shadow = shadows_.of(fake);
    const bool is_same = shadow.sizes() == fake.sizes() && shadow.strides() == fake.strides();
    effects.push_back(is_same ? IValue{} : IValue{shadow});
  }
  return effects;
}

// The rules of `DeviceKernels::correct()` override the results of a smaller trial, and the results of a trial at the
// call's own size override those rules. `complete()` agrees with such a trial.
void MetaCall::correctMetaResults(const RealResults& real) {
  const NoTorchFunction no_torch_function;
  const HiddenCalls guard;
  const KernelTrials& trials = hooks().trials;
  const DeviceKernels& kernels = hooks().kernels;
  if (plan_.device.is_cpu() && !real.has_sizes) {
    trials.correct(real, op_, stack_);
  } else if (plan_.device.is_cuda() && kernels.hasLayoutOfCpu(op_)) {
    trials.correctStrides(real, op_, stack_);
  }
  kernels.correct(op_, arguments(), plan_.device, stack_);
  if (plan_.device.is_cpu() && real.has_sizes) {
    trials.correct(real, op_, stack_);
  }
  kernels.complete(op_, arguments(), plan_.device, stack_);
}

// Called after `error` was raised: by the Meta kernel if `is_prepared`, otherwise before the kernel was called. Raises
// the error of real tensors (NOTE [Errors of real tensors]), or the error that makes the recorder run the
// operator for real. Returns the effects of the CPU kernel, or null if the caller must raise `error`.
std::shared_ptr<ResultRecipe> MetaCall::describeWithoutMetaKernel(bool is_prepared, const std::exception& error) {
  if (!is_prepared) {
    tryOut(TrialReason::kMetaKernelRefuses);
    return nullptr;
  }
  // The registered kernel only raises that there is no kernel, or no kernel for these arguments.
  const auto* missing = dynamic_cast<const c10::NotImplementedError*>(&error);
  if (missing != nullptr) {
    refuseDtypes({});
    if (auto recipe = describeOnZeros()) {
      return recipe;
    }
  }
  const bool is_accepted = !tryOut(TrialReason::kMetaKernelRefuses).values.empty();
  if (missing != nullptr) {
    TORCHEXT_THROW(
        UnsupportedOperatorError,
        c10::str("`", op_.operator_name(), "` cannot be run on fake tensors: ", missing->what_without_backtrace()));
  }
  if (is_accepted && plan_.device.is_cpu()) {
    if (auto recipe = describeOnZeros()) {
      return recipe;
    }
  }
  if (canRunForReal()) {
    // The Meta kernel refuses the call, but real tensors may not.
    TORCHEXT_THROW(UnsupportedOperatorError, c10::str("`", op_.operator_name(), "` is refused by its Meta kernel."));
  }
  return nullptr;
}

// NOTE [Running the CPU kernel]. The recorder runs such a call for real.
std::shared_ptr<ResultRecipe> MetaCall::describeOnZeros() {
  return isRecording() ? nullptr : hooks().trials.describeOnZeros(op_, called_, plan_.device);
}

void MetaCall::convertArguments() {
  const auto& arguments = op_.schema().arguments();
  const int device_argument = runsOnFakes() ? -1 : DeviceRules{op_, called_}.deviceArgument();
  for (const auto i : c10::irange(arguments.size())) {
    stack_[i] =
        static_cast<int>(i) == device_argument ? IValue{c10::Device{c10::kMeta}} : toShadow(stack_[i], arguments[i]);
  }
}

IValue MetaCall::toShadow(const IValue& value, const c10::Argument& argument) {
  if (!runsOnFakes() && value.isBool() && argument.name() == "pin_memory" && takesTensorOptions(op_.schema())) {
    return false;  // nothing to pin, and the meta device refuses to pin
  }
  if (!runsOnFakes() && value.isGenerator()) {
    return IValue{};  // nothing is drawn, and Meta kernels written in Python refuse generators
  }
  if (value.isStorage()) {
    return shadows_.of(value.toStorage());
  }
  return mapTensors(value, [&](const Tensor& tensor) {
    if (isWritten(argument)) {
      written_.push_back(tensor);
    }
    return shadows_.of(tensor);
  });
}

void MetaCall::callMetaKernel() {
  const MetaCallOnDevice hint{plan_.device};
  const NoTorchFunction no_torch_function;
  std::optional<HiddenCalls> hidden;
  std::optional<CallsOfImplementation> of_implementation;
  if (runsOnFakes()) {
    of_implementation.emplace();
  } else {
    hidden.emplace();
  }
  callMetadataKernel(plan_.kernel, op_, stack_);
}

// In-place operators may change more than data: `resize_`, `set_`, `t_` and similar operators change the metadata of
// the shadow, and the fake follows: NOTE [Arguments that change shape].
void MetaCall::describeWritten(const RealResults& real, RecipeBuilder& recipe) {
  const std::size_t first = op_.schema().returns().size();
  for (const auto i : c10::irange(written_.size())) {
    const IValue* value = first + i < real.values.size() ? &real.values[first + i] : nullptr;
    recipe.addWritten(written_[i], shadows_.of(written_[i]), value, real.has_sizes);
  }
}

// Meta kernels that are Python formulas return their argument if there is nothing to do, for example `native_dropout`
// outside of training. The operators return a new tensor, as their schemas declare. (Views are left unchanged:
// `unsafe_split` returns them although it declares none.) Other Meta kernels return one tensor twice where the real
// kernel returns two: the gradients of both biases in `mkldnn_rnn_layer_backward`.
void MetaCall::separateOutputs() {
  if (!declaresNoSharing(op_)) {
    return;
  }
  std::vector<const TensorImpl*> returned;
  mapTensors(stack_, stack_.size(), [&](const Tensor& meta) {
    const TensorImpl* impl = meta.unsafeGetTensorImpl();
    const bool is_argument = shadows_.pairs().originalOf(*impl) != nullptr;
    const bool is_repeated = std::find(returned.begin(), returned.end(), impl) != returned.end() &&
                             op_.hasKernelForDispatchKey(DispatchKey::Meta);
    returned.push_back(impl);
    if (!is_argument && !is_repeated) {
      return meta;
    }
    const Tensor own{at::detail::empty_strided_meta(meta.sizes(), meta.strides(), meta.scalar_type())};
    return runsOnFakes()
               ? makeFakeTensor(makeFakeStorage(own.storage().nbytes(), meta.device()), *own.unsafeGetTensorImpl())
               : own;
  });
}

}  // namespace

void refuseToWriteIntoRealTensors(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t num_arguments = arguments.size();
  for (const auto i : c10::irange(num_arguments)) {
    if (!writesArgument(op, stack, i)) {
      continue;
    }
    const auto visit = [&](const Tensor& tensor) {
      TORCH_CHECK(isFake(tensor), "`", op.operator_name(),
                  "` would write the result of fake tensors into the real tensor `", arguments[i].name(), "` of shape ",
                  tensor.sizes(),
                  ". Make that tensor fake with torchext.fake.fake_like(), or make the other arguments real.");
    };
    forEachTensor(torch::jit::peek(stack, i, num_arguments), visit);
  }
}

MetaPlan planOnMeta(const OperatorHandle& op, const Stack& stack) {
  try {
    checkCanBeFaked(op, stack);
    refuseToWriteIntoRealTensors(op, stack);
    hooks().trials.refuseOverlap(op, stack);
    return {nullptr, DeviceRules{op, stack}.outputDevice(), metadataKernelFor(op, stack)};
  } catch (const c10::Error&) {
    return {std::current_exception()};
  }
}

std::shared_ptr<ResultRecipe> describeOnMeta(const OperatorHandle& op,
                                             const Stack& stack,
                                             CallTensors tensors,
                                             const MetaPlan& plan) {
  MetaCall call{op, stack, tensors, plan};
  try {
    return call.describe();
  } catch (const c10::Error&) {
    if (call.refusal()) {
      return ResultRecipe::refusing(op, call.refusal());
    }
    throw;
  }
}

void runOnMeta(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  const auto tensors = distinctTensors(topOf(stack, count));
  Results results = describeOnMeta(op, stack, tensors, planOnMeta(op, stack))->make(tensors);
  torch::jit::drop(stack, count);
  std::move(results.begin(), results.end(), std::back_inserter(stack));
}

}  // namespace torchext
