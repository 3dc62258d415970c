#include "policies.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../cuda/fake_cuda.h"
#include "../marks/tensor_marks.h"

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

// The kernel for an `Autocast*` key of operators that follow the policy.
class CastingKernel final : public c10::OperatorKernel {
 public:
  explicit CastingKernel(CastPolicy policy) : policy_{policy} {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    // `torch.compile` calls kernels by name (`callBoxedForDispatchKey()`), with keys that may be above theirs.
    const DispatchKey key = (keys & c10::autocast_dispatch_keyset).highestPriorityTypeId();
    const DeviceType device_type = deviceTypeOf(key);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast{key};
    const std::size_t count = op.schema().arguments().size();
    const ScalarType dtype = targetDtype(*stack, count, device_type);
    if (dtype != ScalarType::Undefined) {
      mapTensors(*stack, count, [dtype, device_type](const Tensor& tensor) {
        return autocast::cached_cast(dtype, tensor, device_type);
      });
    }
    op.redispatchBoxed(keys & DispatchKeySet{DispatchKeySet::FULL_AFTER, key}, stack);
  }

 private:
  ScalarType targetDtype(const Stack& stack, std::size_t count, DeviceType device_type) const {
    if (policy_ == CastPolicy::kLowerPrecision) {
      return autocast::get_autocast_dtype(device_type);
    }
    return policy_ == CastPolicy::kFloat32 ? at::kFloat : widestDtype(stack, count, device_type);
  }

  const CastPolicy policy_;
};

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
  const DispatchKey key = autocast::get_autocast_dispatch_key_from_device_type(device_type);
  permanentLibrary(key, std::string{namespaceOf(op.operator_name())})
      .impl(c10::toString(op.operator_name()).c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CastingKernel>(policy)));
}

}  // namespace

void registerPolicy(const std::vector<std::pair<std::string, std::string>>& operators,
                    CastPolicy policy,
                    const std::vector<c10::Device>& devices) {
  const Locked lock{LockRank::kPolicies};
  for (const auto& [name, overload] : operators) {
    const OperatorHandle op = findOperator({name, overload});
    if (policy != CastPolicy::kFallthrough) {
      checkSharesNothing(op);
    }
    for (const c10::Device device : devices) {
      checkFree(op, device.type());
    }
  }
  for (const auto& [name, overload] : operators) {
    for (const c10::Device device : devices) {
      addKernel(findOperator({name, overload}), policy, device.type());
      registered().emplace(entryOf({name, overload}, device.type()), policy);
    }
  }
}

namespace {

// The call of a kernel, and the dtypes of the arguments of its inner call.
struct Probe {
  const std::string* name;  // an operator may call another overload of itself
  std::vector<ScalarType> dtypes;
  // The dtype of the computation, from an argument `dtype`.
  std::optional<ScalarType> dtype;

  bool areAll(ScalarType wanted) const {
    return !dtypes.empty() &&
           std::all_of(dtypes.begin(), dtypes.end(), [wanted](ScalarType found) { return found == wanted; });
  }
};

// The probe that this thread runs.
thread_local Probe* current_probe = nullptr;

// Ends the call of a probe.
class ProbeEnded final : public std::exception {};

// Makes an argument of a call that ends before the operator runs. Only the dtypes of the tensors matter.
IValue makeArgument(const c10::Type& type, c10::function_ref<Tensor()> make_tensor) {
  switch (type.kind()) {
    case TypeKind::TensorType:
      return make_tensor();
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
      return "dimname::x";  // a schema does not distinguish the name of a dimension from other strings
    case TypeKind::ListType: {
      const c10::TypePtr& element = type.castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList list{element};
      list.push_back(makeArgument(*element, make_tensor));
      list.push_back(makeArgument(*element, make_tensor));
      return list;
    }
    default:
      return {};
  }
}

// Returns nothing if the kernel refuses a call with tensors of these dtypes: the first one, and all others.
std::optional<Probe> probeDtypes(const OperatorHandle& op,
                                 DeviceType device_type,
                                 ScalarType first,
                                 ScalarType others) {
  const c10::Device device{device_type, static_cast<c10::DeviceIndex>(device_type == c10::kCPU ? -1 : 0)};
  const auto make_tensor = [&] {
    const Tensor form = at::empty({1}, at::TensorOptions().device(c10::kMeta).dtype(std::exchange(first, others)));
    return makeFakeTensor(makeFakeStorage(form.nbytes(), device), *form.unsafeGetTensorImpl());
  };
  Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    stack.push_back(argument.default_value() ? *argument.default_value() : makeArgument(*argument.type(), make_tensor));
  }
  Probe probe{&op.operator_name().name, {}, {}};
  // Outside of regions, the demand holds the lease of marks for the duration of the call.
  demandMarksKey(MarksFeature::kAmp);
  const auto restore = c10::make_scope_exit([previous = std::exchange(current_probe, &probe)] {
    current_probe = previous;
    releaseMarksKey(MarksFeature::kAmp);
  });
  try {
    op.redispatchBoxed(DispatchKeySet{autocast::get_autocast_dispatch_key_from_device_type(device_type)}, &stack);
  } catch (const ProbeEnded&) {
    return probe;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return probe;
}

// Returns how the kernel that `op` has on the key of autocast treats its arguments.
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

}  // namespace

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

void inspectProbedCall(const OperatorHandle& op, const Stack& stack) {
  Probe* const probe = current_probe;
  if (probe == nullptr || op.operator_name().name != *probe->name) {
    return;
  }
  const auto arguments = argumentsOf(op, stack);
  forEachTensor(arguments, [probe](const Tensor& tensor) { probe->dtypes.push_back(tensor.scalar_type()); });
  if (const IValue& dtype = argumentNamed(op, arguments, "dtype"); !dtype.isNone()) {
    probe->dtype = dtype.toScalarType();
  }
  throw ProbeEnded{};
}

}  // namespace torchext
