#include "policies.h"

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../marks/marks_key.h"
#include "amp_tensor.h"

namespace torchext {

using at::ScalarType;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorName;
using c10::TypeKind;

namespace {

using Registered = std::map<std::pair<std::string, DeviceType>, CastPolicy>;

Registered& registered() {
  static auto* all = new Registered;
  return *all;
}

std::pair<std::string, DeviceType> entryOf(const OperatorName& name, DeviceType device_type) {
  return {c10::toString(name), device_type};
}

DeviceType deviceTypeOf(DispatchKey key) {
  const auto& all = autocast::supported_devices();
  const auto found = std::find_if(all.begin(), all.end(), [key](DeviceType device_type) {
    return autocast::get_autocast_dispatch_key_from_device_type(device_type) == key;
  });
  TORCH_INTERNAL_ASSERT(found != all.end());
  return *found;
}

// Returns the widest of the dtypes that autocast casts between. Different lower precisions promote to float32.
ScalarType widestDtype(const Stack& stack, std::size_t count, DeviceType device_type) {
  auto widest = ScalarType::Undefined;
  forEachTensor(topOf(stack, count), [&widest, device_type](const Tensor& tensor) {
    const ScalarType dtype = tensor.scalar_type();
    const bool is_one = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
    if (is_one && autocast::is_eligible(tensor, device_type)) {
      widest = widest == ScalarType::Undefined ? dtype : c10::promoteTypes(widest, dtype);
    }
  });
  return widest;
}

template <CastPolicy kPolicy>
ScalarType targetDtype(const Stack& stack, std::size_t count, DeviceType device_type) {
  if (kPolicy == CastPolicy::kLowerPrecision) {
    return autocast::get_autocast_dtype(device_type);
  }
  return kPolicy == CastPolicy::kFloat32 ? at::kFloat : widestDtype(stack, count, device_type);
}

// The kernel for an `Autocast*` key of operators that follow the policy.
template <CastPolicy kPolicy>
void castAndRun(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  // `torch.compile` calls kernels by name (`callBoxedForDispatchKey()`), with keys that may be above theirs.
  const DispatchKey key = (keys & c10::autocast_dispatch_keyset).highestPriorityTypeId();
  const DeviceType device_type = deviceTypeOf(key);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{key};
  const std::size_t count = op.schema().arguments().size();
  const ScalarType dtype = targetDtype<kPolicy>(*stack, count, device_type);
  if (dtype != ScalarType::Undefined) {
    mapTensors(*stack, count, [dtype, device_type](const Tensor& tensor) {
      return autocast::cached_cast(dtype, tensor, device_type);
    });
  }
  op.redispatchBoxed(keys & DispatchKeySet{DispatchKeySet::FULL_AFTER, key}, stack);
}

torch::CppFunction kernelOf(CastPolicy policy) {
  switch (policy) {
    case CastPolicy::kLowerPrecision:
      return torch::CppFunction::makeFromBoxedFunction<&castAndRun<CastPolicy::kLowerPrecision>>();
    case CastPolicy::kFloat32:
      return torch::CppFunction::makeFromBoxedFunction<&castAndRun<CastPolicy::kFloat32>>();
    case CastPolicy::kPromote:
      return torch::CppFunction::makeFromBoxedFunction<&castAndRun<CastPolicy::kPromote>>();
    default:
      TORCH_INTERNAL_ASSERT(false);
  }
}

OperatorHandle findOperator(const OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  TORCH_CHECK_VALUE(op.has_value(), "There is no operator `", name,
                    "`. Define it first, with torch.library or TORCH_LIBRARY, and pass its name with the namespace and "
                    "the overload, as in 'aten::add.Tensor'.");
  return *op;
}

void checkFree(const OperatorHandle& op, DeviceType device_type) {
  const auto& policies = registered();
  const auto name = c10::DeviceTypeName(device_type, /*lower_case=*/true);
  TORCH_CHECK_VALUE(policies.count(entryOf(op.operator_name(), device_type)) == 0, "`", op.operator_name(),
                    "` has a policy for '", name, "' already. A policy can be registered once per process.");
  TORCH_CHECK_VALUE(!op.hasKernelForDispatchKey(autocast::get_autocast_dispatch_key_from_device_type(device_type)), "`",
                    op.operator_name(), "` has an autocast kernel for '", name,
                    "' already, from PyTorch or torch.library.register_autocast(). torchext.amp.policy() returns its "
                    "policy.");
}

// Checks that `op` neither writes nor returns views of its arguments, because a cast is another tensor.
void checkSharesNothing(const OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    TORCH_CHECK_VALUE(argument.alias_info() == nullptr, "`", op.operator_name(), "` ",
                      isWritten(argument) ? "writes into" : "returns a view of", " its argument `", argument.name(),
                      "`, but a policy would replace this argument by a cast. Register policies for operators that "
                      "return new tensors.");
  }
}

void addKernel(const OperatorHandle& op, CastPolicy policy, DeviceType device_type) {
  // Operators without a kernel fall through.
  if (policy == CastPolicy::kFallthrough) {
    return;
  }
  const std::string& name = op.operator_name().name;
  const std::string name_space = name.substr(0, name.find("::"));
  const DispatchKey key = autocast::get_autocast_dispatch_key_from_device_type(device_type);
  // Leaked: the registration lives as long as the process.
  auto* library = new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
  library->impl(c10::toString(op.operator_name()).c_str(), kernelOf(policy));
}

}  // namespace

void registerPolicy(const std::vector<OperatorName>& operators,
                    CastPolicy policy,
                    const std::vector<DeviceType>& device_types) {
  const Locked lock{LockRank::kPolicies};
  for (const OperatorName& name : operators) {
    const OperatorHandle op = findOperator(name);
    if (policy != CastPolicy::kFallthrough) {
      checkSharesNothing(op);
    }
    for (const DeviceType device_type : device_types) {
      checkFree(op, device_type);
    }
  }
  for (const OperatorName& name : operators) {
    for (const DeviceType device_type : device_types) {
      addKernel(findOperator(name), policy, device_type);
      registered().emplace(entryOf(name, device_type), policy);
    }
  }
}

CastPolicy policyOf(const OperatorName& name, DeviceType device_type) {
  const OperatorHandle op = findOperator(name);
  {
    const Locked lock{LockRank::kPolicies};
    const auto& policies = registered();
    const auto found = policies.find(entryOf(name, device_type));
    if (found != policies.end()) {
      return found->second;
    }
  }
  return probeKernel(op, device_type);
}

namespace {

// The dtypes of the arguments of a kernel's inner call.
struct ProbeResult {
  std::vector<ScalarType> dtypes;
  // The dtype of the computation, from an argument `dtype`.
  std::optional<ScalarType> dtype;

  bool areAll(ScalarType wanted) const {
    return !dtypes.empty() &&
           std::all_of(dtypes.begin(), dtypes.end(), [wanted](ScalarType found) { return found == wanted; });
  }
};

// The probe that this thread runs. An operator may call another overload of itself.
struct Probe {
  const std::string* name;
  ProbeResult* result;
};

thread_local Probe probe{nullptr, nullptr};

// Ends the call of a probe.
class ProbeEnded final : public std::exception {};

// Makes the arguments of calls that end before the operator runs. Only the dtypes of the tensors matter.
class ProbeArguments {
 public:
  ProbeArguments(DeviceType device_type, ScalarType first, ScalarType others)
      : device_{device_type, static_cast<c10::DeviceIndex>(device_type == c10::kCPU ? -1 : 0)},
        dtype_{first},
        others_{others} {}

  Stack of(const c10::FunctionSchema& schema) {
    Stack stack;
    for (const c10::Argument& argument : schema.arguments()) {
      stack.push_back(argument.default_value() ? *argument.default_value() : make(*argument.type()));
    }
    return stack;
  }

 private:
  IValue make(const c10::Type& type) {
    switch (type.kind()) {
      case TypeKind::TensorType:
        return tensor();
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        return 1;
      case TypeKind::FloatType:
        return 1.0;
      case TypeKind::NumberType:
        return at::Scalar(1);
      case TypeKind::BoolType:
        return false;
      case TypeKind::StringType:
        return nameOfDimension();
      case TypeKind::ListType:
        return makeList(*type.castRaw<c10::ListType>()->getElementType());
      default:
        return {};
    }
  }

  IValue makeList(const c10::Type& element) {
    switch (element.kind()) {
      case TypeKind::TensorType:
        return c10::List<Tensor>({tensor(), tensor()});
      case TypeKind::OptionalType:
        return c10::List<std::optional<Tensor>>();
      case TypeKind::FloatType:
        return c10::List<double>({1.0});
      case TypeKind::BoolType:
        return c10::List<bool>({false});
      case TypeKind::StringType:
        return c10::List<std::string>({nameOfDimension()});
      case TypeKind::NumberType:
        return c10::List<at::Scalar>();
      default:
        return c10::List<std::int64_t>({1, 1});
    }
  }

  // A schema does not distinguish it from other strings.
  static std::string nameOfDimension() {
    return "dimname::x";
  }

  Tensor tensor() {
    const Tensor form = at::empty({1}, at::TensorOptions().device(c10::kMeta).dtype(std::exchange(dtype_, others_)));
    return makeFakeTensor(makeFakeStorage(form.nbytes(), device_), *form.unsafeGetTensorImpl());
  }

  c10::Device device_;
  ScalarType dtype_;
  ScalarType others_;
};

// Returns nothing if the kernel refuses the call.
std::optional<ProbeResult> probeDtypes(const OperatorHandle& op,
                                       DeviceType device_type,
                                       ScalarType first,
                                       ScalarType others) {
  Stack stack = ProbeArguments{device_type, first, others}.of(op.schema());
  ProbeResult result;
  const auto restore = c10::make_scope_exit(
      [previous = std::exchange(probe, {&op.operator_name().name, &result})] { probe = previous; });
  const MarksDemand demand{MarksFeature::kAmp};
  try {
    op.redispatchBoxed(DispatchKeySet{autocast::get_autocast_dispatch_key_from_device_type(device_type)}, &stack);
  } catch (const ProbeEnded&) {
    return result;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return result;
}

}  // namespace

CastPolicy probeKernel(const OperatorHandle& op, DeviceType device_type) {
  if (!op.hasKernelForDispatchKey(autocast::get_autocast_dispatch_key_from_device_type(device_type))) {
    return CastPolicy::kFallthrough;
  }
  // AutocastRNN.cpp rearranges the weights, which requires matching arguments and cuDNN.
  if (op.operator_name().name == "aten::_cudnn_rnn" || op.operator_name().name == "aten::miopen_rnn") {
    return CastPolicy::kLowerPrecision;
  }
  // Casts run on fakes, hidden from the user's modes.
  const DispatchKeySet reached({c10::DispatchKey::Fake, kMarksKey});
  const c10::impl::ForceDispatchKeyGuard state{c10::default_included_set,
                                               c10::default_excluded_set | (kHiddenFromUsers - reached)};
  std::optional<FakeCudaGuard> devices;
  if (device_type == c10::kCUDA) {
    devices.emplace(static_cast<c10::DeviceIndex>(1));
  }
  const ScalarType lower = autocast::get_autocast_dtype(device_type);
  const auto wide = probeDtypes(op, device_type, at::kFloat, at::kFloat);
  const auto narrow = probeDtypes(op, device_type, lower, lower);
  const auto mixed = probeDtypes(op, device_type, lower, at::kFloat);
  if (!wide || !narrow || !mixed) {
    return CastPolicy::kBanned;
  }
  if (wide->areAll(lower)) {
    return CastPolicy::kLowerPrecision;
  }
  if (narrow->areAll(at::kFloat) || narrow->dtype == at::kFloat) {
    return CastPolicy::kFloat32;
  }
  return mixed->areAll(at::kFloat) ? CastPolicy::kPromote : CastPolicy::kFallthrough;
}

bool isProbingKernel() noexcept {
  return probe.result != nullptr;
}

void inspectProbedCall(const OperatorHandle& op, const Stack& stack) {
  if (op.operator_name().name != *probe.name) {
    return;
  }
  ProbeResult& result = *probe.result;
  const auto arguments = argumentsOf(op, stack);
  forEachTensor(arguments, [&result](const Tensor& tensor) { result.dtypes.push_back(tensor.scalar_type()); });
  if (const IValue& dtype = argumentNamed(op, arguments, "dtype"); !dtype.isNone()) {
    result.dtype = dtype.toScalarType();
  }
  throw ProbeEnded{};
}

}  // namespace torchext
