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

#include "../fake/calls/hidden_keys.h"
#include "../fake/cuda/fake_cuda.h"
#include "../fake/storage/fake_storage.h"
#include "../fake/storage/fake_tensor_impl.h"
#include "../support/stack_utils.h"
#include "../torch_internals/autocast_mode.h"
#include "amp_tensor.h"

namespace torchext {

using at::ScalarType;
using at::Tensor;
using c10::DeviceType;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::TypeKind;
using torch::jit::Stack;

namespace {

// The arguments that a kernel passes to its operator.
struct Answer {
  std::vector<ScalarType> dtypes;
  // The value of an argument `dtype`, in which the operator computes.
  std::optional<ScalarType> dtype;

  bool areAll(ScalarType wanted) const {
    return !dtypes.empty() &&
           std::all_of(dtypes.begin(), dtypes.end(), [wanted](ScalarType found) { return found == wanted; });
  }
};

// The probe of this thread. An operator may call another of its overloads.
struct Question {
  const std::string* name;
  Answer* answer;
};

thread_local Question question{nullptr, nullptr};

class QuestionGuard {
 public:
  QuestionGuard(const std::string& name, Answer& answer) : previous_{std::exchange(question, {&name, &answer})} {}
  C10_DISABLE_COPY_AND_ASSIGN(QuestionGuard);
  ~QuestionGuard() {
    question = previous_;
  }

 private:
  Question previous_;
};

// Ends a call whose answer is complete.
class Answered final : public std::exception {};

// Makes the arguments of calls that end before the operator runs. Only the dtypes of the tensors matter.
class Arguments {
 public:
  Arguments(DeviceType device_type, ScalarType first, ScalarType others)
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

// Returns nullopt if the kernel raises an error.
std::optional<Answer> ask(const OperatorHandle& op, DeviceType device_type, ScalarType first, ScalarType others) {
  Stack stack = Arguments{device_type, first, others}.of(op.schema());
  Answer answer;
  const QuestionGuard guard{op.operator_name().name, answer};
  const MarksDemand demand{MarksFeature::kAmp};
  try {
    op.redispatchBoxed(DispatchKeySet{autocast::get_autocast_dispatch_key_from_device_type(device_type)}, &stack);
  } catch (const Answered&) {
    return answer;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return answer;
}

}  // namespace

CastPolicy askKernel(const OperatorHandle& op, DeviceType device_type) {
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
  const auto wide = ask(op, device_type, at::kFloat, at::kFloat);
  const auto narrow = ask(op, device_type, lower, lower);
  const auto mixed = ask(op, device_type, lower, at::kFloat);
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

bool isAskingKernel() noexcept {
  return question.answer != nullptr;
}

void lookAtAskedCall(const OperatorHandle& op, const Stack& stack) {
  if (op.operator_name().name != *question.name) {
    return;
  }
  Answer& answer = *question.answer;
  const std::size_t count = op.schema().arguments().size();
  forEachTensor(stack, count, [&answer](const Tensor& tensor) { answer.dtypes.push_back(tensor.scalar_type()); });
  const int position = findArgument(op.schema(), "dtype");
  if (position >= 0) {
    const IValue& dtype = torch::jit::peek(stack, static_cast<std::size_t>(position), count);
    if (!dtype.isNone()) {
      answer.dtype = dtype.toScalarType();
    }
  }
  throw Answered{};
}

}  // namespace torchext
