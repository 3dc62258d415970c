#include "meta_call.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/irange.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/held_warnings.h"
#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../calls/errors.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "../storage/fake_keys.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "device_rules.h"
#include "meta_kernel.h"
#include "recipe_builder.h"

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

// NOTE [Sources of recipes]
//
// The first source that has a recipe of a call describes it:
//
//   1. a trial of the real kernel, for some calls: NOTE [Trials instead of Meta kernels];
//   2. the kernel of the plan, unless it raises an error;
//   3. the CPU kernel on zeros, if there is no other kernel for these arguments (NotImplementedError), or if real
//      tensors on the CPU accept what the kernel of the plan refuses: NOTE [Running the CPU kernel].
//
// A call without a recipe is refused: with the error of real tensors (NOTE [Errors of real tensors]), or else with that
// of the plan or the kernel. If the recorder can run the call for real, the error is UnsupportedOperatorError.
//
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

  // After `describe()` has raised an error: the error, if it is that of real tensors, or null.
  const std::exception_ptr& refusal() const noexcept {
    return refusal_;
  }

  std::shared_ptr<ResultRecipe> describe() {
    if (!plan_.refusal) {
      for (const auto source : {&MetaCall::describeByTrial, &MetaCall::describeByKernel, &MetaCall::describeOnZeros}) {
        if (auto recipe = (this->*source)()) {
          return recipe;
        }
      }
    }
    refuse();
  }

 private:
  c10::ArrayRef<IValue> arguments() const {
    return argumentsOf(op_, called_);
  }

  bool runsOnFakes() const {
    return plan_.kernel == MetadataKernel::kFake;
  }

  template <typename Check>
  auto recordRefusalOf(const Check& check) {
    try {
      return check();
    } catch (const c10::Error&) {
      refusal_ = std::current_exception();
      throw;
    }
  }

  RealResults tryOut(TrialReason reason, Arguments meta_results = {}) {
    return recordRefusalOf([&] { return hooks().trials.tryOut(reason, op_, arguments(), meta_results); });
  }

  bool isTriedOutFirst() const {
    return plan_.kernel == MetadataKernel::kMeta && plan_.device.is_cpu() && declaresNoSharing(op_) &&
           !needsValues(op_, called_) && hasOnlyPythonMetaKernel(op_);
  }

  std::shared_ptr<ResultRecipe> describeResults(RecipeBuilder&& recipe) {
    return std::move(recipe).build(stack_, plan_.device, makesPinned(op_, arguments()));
  }

  // The sources, which return null if they have no recipe of the call. `describe()` calls them in this order,
  // because each uses the results of the previous ones.
  std::shared_ptr<ResultRecipe> describeByTrial() {
    if (!isTriedOutFirst()) {
      return nullptr;
    }
    real_ = tryOut(TrialReason::kInsteadOfPython);
    if (!real_.are_new) {
      return nullptr;
    }
    passOn(real_.warnings);
    stack_ = real_.values;
    return describeResults(RecipeBuilder{op_, tensors_, shadows_.pairs()});
  }

  std::shared_ptr<ResultRecipe> describeByKernel() {
    convertArguments();
    if (!callKernel()) {
      return nullptr;
    }
    compareWithTrial();
    refuseDtypes(stack_);
    // Meta kernels omit some warnings and word others differently.
    const bool is_real = plan_.device.is_cpu() && real_.has_sizes && !real_.values.empty();
    passOn(is_real ? real_.warnings : warnings_);
    correctMetaResults();
    RecipeBuilder recipe{op_, tensors_, shadows_.pairs()};
    describeWritten(recipe);
    separateOutputs();
    return describeResults(std::move(recipe));
  }

  // NOTE [Running the CPU kernel]. Has no recipe while recording: the recorder runs such a call for real.
  std::shared_ptr<ResultRecipe> describeOnZeros() {
    if (no_kernel_) {
      refuseDtypes({});
    } else if (tryOut(TrialReason::kMetaKernelRefuses).values.empty() || !plan_.device.is_cpu()) {
      return nullptr;
    }
    return isRecording() ? nullptr : hooks().trials.describeOnZeros(op_, called_, plan_.device);
  }

  // NOTE [Dtypes that CUDA kernels refuse]
  void refuseDtypes(c10::ArrayRef<IValue> results) {
    recordRefusalOf([&] { hooks().kernels.refuseDtypes(op_, arguments(), results, plan_.device); });
  }

  // Returns true if the operator resizes an argument, and neither the Meta kernel nor a smaller trial reveals its
  // shape.
  bool needsSizes() {
    const std::size_t first = op_.schema().returns().size();
    bool needs = false;
    for (const auto i : c10::irange(written_.size())) {
      needs = needs || (!real_.has_sizes && first + i < real_.values.size() && real_.values[first + i].isTensor() &&
                        shadows_.of(written_[i]).sizes() == written_[i].sizes());
    }
    return needs;
  }

  // The rules of `DeviceKernels::correct()` override the results of a smaller trial, and the results of a trial at the
  // call's own size override those rules. `complete()` agrees with such a trial.
  void correctMetaResults() {
    const NoTorchFunction no_torch_function;
    const HiddenCalls guard;
    const KernelTrials& trials = hooks().trials;
    const DeviceKernels& kernels = hooks().kernels;
    if (plan_.device.is_cpu() && !real_.has_sizes) {
      trials.correct(real_, op_, stack_);
    } else if (plan_.device.is_cuda() && kernels.hasLayoutOfCpu(op_)) {
      trials.correctStrides(real_, op_, stack_);
    }
    kernels.correct(op_, arguments(), plan_.device, stack_);
    if (plan_.device.is_cpu() && real_.has_sizes) {
      trials.correct(real_, op_, stack_);
    }
    kernels.complete(op_, arguments(), plan_.device, stack_);
  }

  [[noreturn]] void refuse() {
    if (plan_.refusal) {
      tryOut(lacksValues(op_, called_) ? TrialReason::kNeedsValues : TrialReason::kMetaKernelRefuses);
      std::rethrow_exception(plan_.refusal);
    }
    if (no_kernel_) {
      tryOut(TrialReason::kMetaKernelRefuses);
      TORCHEXT_THROW(UnsupportedOperatorError,
                     c10::str("`", op_.operator_name(), "` cannot be run on fake tensors: ", *no_kernel_));
    }
    if (canRunForReal()) {
      // The Meta kernel refuses the call, but real tensors may not.
      TORCHEXT_THROW(UnsupportedOperatorError, c10::str("`", op_.operator_name(), "` is refused by its Meta kernel."));
    }
    std::rethrow_exception(error_);
  }

  void convertArguments() {
    const auto& arguments = op_.schema().arguments();
    const int device_argument = runsOnFakes() ? -1 : deviceArgument(op_);
    for (const auto i : c10::irange(arguments.size())) {
      stack_[i] =
          static_cast<int>(i) == device_argument ? IValue{c10::Device{c10::kMeta}} : toShadow(stack_[i], arguments[i]);
    }
    written_shadows_.emplace(op_.schema(), stack_);
  }

  IValue toShadow(const IValue& value, const c10::Argument& argument) {
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

  // Returns false, and keeps the error, if the kernel refuses the call.
  bool callKernel() {
    try {
      const NoTorchFunction no_torch_function;
      std::optional<HiddenCalls> hidden;
      std::optional<CallsOfImplementation> of_implementation;
      if (runsOnFakes()) {
        of_implementation.emplace();
      } else {
        hidden.emplace();
      }
      HeldWarnings held;
      callMetadataKernel(plan_.kernel, plan_.device, op_, stack_);
      warnings_ = held.consume();
      return true;
    } catch (const DataDependentError&) {
      tryOut(TrialReason::kNeedsValues);  // the kernel computes the results unless it refuses
      throw;
    } catch (const c10::NotImplementedError& error) {
      no_kernel_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      if (interpreter().isInterrupt(error)) {
        throw;
      }
      error_ = std::current_exception();
    }
    return false;
  }

  // Tries out a call that the kernel accepts.
  void compareWithTrial() {
    if (!real_.values.empty() || needsValues(op_, called_)) {  // stand-ins have no values
      return;
    }
    Stack effects = stack_;
    written_shadows_->appendChanged(effects);
    real_ = tryOut(TrialReason::kMetaKernelAccepts, effects);
    if (needsSizes()) {
      RealResults of_its_size = tryOut(TrialReason::kMetaKernelRefuses);
      if (!of_its_size.values.empty()) {
        real_ = std::move(of_its_size);
      }
    }
  }

  // In-place operators may change more than data: `resize_`, `set_`, `t_` and similar operators change the metadata of
  // the shadow, and the fake follows: NOTE [Arguments that change shape].
  void describeWritten(RecipeBuilder& recipe) {
    const std::size_t first = op_.schema().returns().size();
    for (const auto i : c10::irange(written_.size())) {
      const IValue* value = first + i < real_.values.size() ? &real_.values[first + i] : nullptr;
      recipe.addWritten(written_[i], shadows_.of(written_[i]), value, real_.has_sizes);
    }
  }

  // Meta kernels that are Python formulas return their argument if there is nothing to do, for example `native_dropout`
  // outside of training. The operators return a new tensor, as their schemas declare. (Views are left unchanged:
  // `unsafe_split` returns them although it declares none.) Other Meta kernels return one tensor twice where the real
  // kernel returns two: the gradients of both biases in `mkldnn_rnn_layer_backward`.
  void separateOutputs() {
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

  const OperatorHandle& op_;
  const Stack& called_;  // has the arguments on top
  const CallTensors tensors_;
  const MetaPlan& plan_;
  std::exception_ptr refusal_;
  Stack stack_;  // first the arguments, then the converted ones, then the results
  Shadows shadows_;
  // The arguments whose data or metadata the operator writes.
  std::vector<Tensor> written_;
  std::optional<WrittenTensors> written_shadows_;
  RealResults real_;                      // of a trial
  std::vector<c10::Warning> warnings_;    // of the kernel
  std::exception_ptr error_;              // of the kernel
  std::optional<std::string> no_kernel_;  // the message of that error, if there is no kernel for these arguments
};

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
    return {nullptr, outputDevice(op, stack), metadataKernelFor(op, stack)};
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
  replaceTop(stack, count, describeOnMeta(op, stack, tensors, planOnMeta(op, stack))->make(tensors));
}

}  // namespace torchext
