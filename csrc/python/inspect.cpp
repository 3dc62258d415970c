#include <array>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include "../core/deferred_init/record/recorder.h"
#include "../core/fake/calls/recording.h"
#include "../core/fake/fake_handler.h"
#include "../core/fake/storage/fake_keys.h"
#include "../core/torch_internals/dispatcher_internals.h"
#include "../extensions/amp/amp_tensor.h"
#include "../libraries/support/operator_table.h"
#include "../libraries/support/sizes.h"
#include "../libraries/support/stack_utils.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

c10::OperatorHandle findOperator(const std::string& name, const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK_VALUE(op.has_value(), "The dispatcher has no operator `", c10::OperatorName{name, overload},
                    "`. torch.ops also lists operators that only TorchScript calls.");
  return *op;
}

bool hasOperator(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({name, overload}).has_value();
}

// Like `_get_operation_for_overload_or_packet()`, which accepts numbers for tensors in some operators.
torch::jit::Stack convertArguments(const c10::FunctionSchema& schema,
                                   const pybind11::tuple& args,
                                   const pybind11::dict& kwargs) {
  const c10::Symbol symbol = c10::Symbol::fromQualString(schema.name());
  const torch::jit::ToIValueAllowNumbersAsTensors allow{
      symbol.is_prims() || symbol.is_nvprims() ||
      (symbol.is_aten() && torch::should_allow_numbers_as_tensors(symbol.toUnqualString()))};
  try {
    return torch::jit::createStackForSchema(schema, torch::jit::tuple_slice{args},
                                            pybind11::reinterpret_borrow<pybind11::kwargs>(kwargs), std::nullopt);
  } catch (const torch::jit::schema_match_error& error) {
    throw pybind11::type_error(error.what());
  }
}

// A call that torchext/inspect.py follows over the dispatch keys. It is never made.
struct PredictedCall {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
};

PredictedCall makePredictedCall(const std::string& name,
                                const std::string& overload,
                                const pybind11::tuple& args,
                                const pybind11::dict& kwargs) {
  const c10::OperatorHandle op = findOperator(name, overload);
  return {op, convertArguments(op.schema(), args, kwargs)};
}

// Returns the keys of the tensor arguments and of the thread. Makes a new extractor, which, unlike the operator's own,
// does not leave out keys that fall through.
c10::DispatchKeySet keysOf(const PredictedCall& call) {
  return c10::DispatchKeyExtractor::make(call.op.schema()).getDispatchKeySetBoxed(&call.arguments);
}

bool hasTensors(const PredictedCall& call) {
  const c10::ArrayRef<c10::IValue> arguments = call.arguments;
  return hasTensor(arguments, [](const at::Tensor& /*tensor*/) { return true; });
}

// Returns the backend that `dtype`, `layout` and `device` name, or nothing for an operator without these arguments.
std::optional<c10::DispatchKey> selectedBackend(const PredictedCall& call) {
  const c10::FunctionSchema& schema = call.op.schema();
  const auto dtype = schema.argumentIndexWithName("dtype");
  const auto layout = schema.argumentIndexWithName("layout");
  const auto device = schema.argumentIndexWithName("device");
  if (!dtype || !layout || !device) {
    return std::nullopt;
  }
  const auto argument = [&](int index) { return call.arguments.at(toSize(index)); };
  return c10::computeDispatchKey(argument(*dtype).toOptional<c10::ScalarType>(),
                                 argument(*layout).toOptional<c10::Layout>(),
                                 argument(*device).toOptional<c10::Device>());
}

// Returns the entry of the dispatch table for `key`: whether there is a kernel, whether it falls through, whether it is
// written in Python, the place of its registration, and the reason for which the dispatcher chooses it.
std::tuple<bool, bool, bool, std::string, std::string> tableEntry(const PredictedCall& call, c10::DispatchKey key) {
  const TableKernel found = tableKernel(call.op, key);
  const c10::KernelFunction& kernel = found.registered.kernel;
  return {kernel.isValid(), kernel.isFallthrough(), isPythonKernel(kernel), found.registered.source, found.reason};
}

// Returns the message of the error that PyTorch raises when the call reaches a key that has no kernel.
std::string missingKernelMessage(const PredictedCall& call, c10::DispatchKey key) {
  try {
    operatorEntry(call.op).reportError(key);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();  // the error of the callback that `torch._custom_op` sets
  }
}

constexpr std::array kFakeOutcomes{"passes on",  "records",    "runs for real", "lifts",  "pins",
                                   "decomposes", "is handled", "runs on Meta",  "refuses"};
constexpr std::array kEffects{"handler computes", "handler decomposes", "handler passes on"};
constexpr std::array kMetadataKernels{"Meta kernel", "composite kernel", "fake implementation",
                                      "own kernel",  "kernel on zeros",  "no kernel"};
constexpr std::array kRecorderOutcomes{"decomposes",   "passes on", "passes on below", "lifts",        "communicates",
                                       "synchronizes", "shows",     "runs for real",   "runs as fake", "records"};
constexpr std::array kAmpOutcomes{"passes on", "passes on in backward", "autocasts", "cleans"};

// `names` are those of the enumerators to `kLast`, in their order.
template <auto kLast, std::size_t N>
std::string nameOf(decltype(kLast) enumerator, const std::array<const char*, N>& names) {
  static_assert(N == static_cast<std::size_t>(kLast) + 1);
  return names.at(static_cast<std::size_t>(enumerator));
}

using Prediction = std::tuple<std::string, std::string>;

Prediction predictRefusal(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError& refusal) {
    return {"not implemented", refusal.what_without_backtrace()};
  } catch (const c10::Error& refusal) {
    return {"refuses", refusal.what_without_backtrace()};
  }
}

// Returns the decision of the handler of `Fake` and its details, if kernels on the way have included keys in those of
// the thread, and excluded others. `is_recorded`: the recorder of deferred_init makes the call.
Prediction predictFakeOnTheWay(const PredictedCall& call,
                               c10::DispatchKeySet keys,
                               c10::DispatchKeySet included,
                               c10::DispatchKeySet excluded,
                               bool is_recorded) {
  const c10::impl::IncludeDispatchKeyGuard include{included};
  const c10::impl::ExcludeDispatchKeyGuard exclude{excluded};
  std::optional<FakeFactoriesGuard> factories;
  if (included.has(c10::DispatchKey::Fake)) {
    factories.emplace();
  }
  std::optional<RecordingGuard> recording;
  if (is_recorded) {
    recording.emplace(/*can_run_for_real=*/true);
  }
  const FakeDecision decision = predictFake(call.op, keys, call.arguments);
  if (const std::exception_ptr error = decision.error()) {
    return predictRefusal(error);
  }
  switch (decision.outcome) {
    case FakeOutcome::kHandled:
      return {nameOf<HandledCall::Effect::kPassesOn>(decision.handled.effect, kEffects), decision.handled.description};
    case FakeOutcome::kRunsOnMeta:
      return {nameOf<MetadataKernel::kMissing>(decision.plan.kernel, kMetadataKernels), ""};
    default:
      return {nameOf<FakeOutcome::kRefuses>(decision.outcome, kFakeOutcomes), ""};
  }
}

std::string predictRecorderOf(const PredictedCall& call, c10::DispatchKeySet keys, bool is_below_autograd) {
  return nameOf<RecorderOutcome::kRecords>(predictRecorder(call.op, keys, call.arguments, is_below_autograd),
                                           kRecorderOutcomes);
}

std::tuple<std::string, c10::DispatchKeySet> predictAmpOf(const PredictedCall& call) {
  const AmpPrediction predicted = predictAmp(call.op, call.arguments);
  return {nameOf<AmpOutcome::kCleans>(predicted.outcome, kAmpOutcomes), predicted.autocast_keys};
}

void bindPredictedCall(pybind11::module_& module) {
  pybind11::class_<PredictedCall>(module, "PredictedCall")
      .def(pybind11::init(torch::wrap_pybind_function(makePredictedCall)))
      .def("keys", torch::wrap_pybind_function(keysOf))
      .def("has_tensors", hasTensors)
      .def("selected_backend", torch::wrap_pybind_function(selectedBackend))
      .def("table_entry", torch::wrap_pybind_function(tableEntry))
      .def("missing_kernel_message", torch::wrap_pybind_function(missingKernelMessage))
      .def("predict_fake", torch::wrap_pybind_function(predictFakeOnTheWay))
      .def("predict_recorder", torch::wrap_pybind_function(predictRecorderOf), pybind11::arg("keys"),
           pybind11::arg("is_below_autograd"))
      .def("predict_amp", torch::wrap_pybind_function(predictAmpOf));
}

// Returns fields of torchext.inspect.TensorState. Attributes of Python may be those of a subclass, and `is_leaf` there
// makes the `grad_fn` of a view whose base was written to.
pybind11::dict autogradState(const at::Tensor& tensor) {
  using pybind11::literals::operator""_a;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::VariableVersion& version = impl.version_counter();
  return pybind11::dict("version"_a = version.enabled() ? std::optional{version.current_version()} : std::nullopt,
                        "has_autograd_metadata"_a = impl.autograd_meta() != nullptr,
                        "inference"_a = tensor.is_inference(), "requires_grad"_a = tensor.requires_grad(),
                        "is_leaf"_a = tensor.is_leaf(), "is_view"_a = tensor.is_view());
}

}  // namespace

void bindInspect(pybind11::module_& module) {
  bind(module, "has_operator", hasOperator);
  bind(module, "operator_tables", describeOperatorTables);
  bindPredictedCall(module);
  module.def("autograd_state", torch::wrap_pybind_function(autogradState));
}

}  // namespace torchext::python
