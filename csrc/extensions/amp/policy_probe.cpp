#include "policy_probe.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../marks/marks_key.h"
#include "amp_tensor.h"

namespace torchext {

using at::ScalarType;
using c10::DeviceType;
using c10::DispatchKeySet;
using c10::TypeKind;

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
