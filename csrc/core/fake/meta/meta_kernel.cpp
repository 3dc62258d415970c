#include "meta_kernel.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <c10/util/ScopeExit.h>

#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../../torch_internals/dispatcher_internals.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"

namespace torchext {

using c10::DispatchKey;

namespace {

thread_local std::optional<c10::Device> meta_call_device;

// Returns true for operators whose C++ code runs on any device but whose registered decomposition for Meta differs.
// That of `ldexp` turns integers into float32 instead of the default dtype. Those of `t_`, `squeeze_` and other
// operators that change a view in place raise AssertionError.
bool isComposedOperator(const OperatorHandle& op) {
  const bool differs = (op.schema().name() == "aten::ldexp" && op.schema().overload_name() == "Tensor") ||
                       (op.hasTag(at::Tag::inplace_view) && namespaceOf(op.operator_name()) == "aten");
  return differs && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
}

// Returns true for scatters that copy the whole storage (`clone_preserve_strides()`, TensorConversions.cpp). Their
// Python references copy it only up to the last element.
bool isScatterIntoCopy(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return (name == "aten::slice_scatter" || name == "aten::select_scatter" || name == "aten::diagonal_scatter") &&
         op.schema().overload_name().empty() &&
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Returns true for factories whose C++ code allocates and fills on any device. This code determines inferred dtypes
// (`full` of a complex number under a default dtype of float16) and errors (`arange` to NaN).
bool isComposedFactory(const OperatorHandle& op, const Stack& stack) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::CPU) && isFactory(op, argumentsOf(op, stack));
}

// Returns true if a tensor or number among the arguments is complex.
bool hasComplex(c10::ArrayRef<c10::IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_complex(); }) ||
         std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::IValue& value) { return value.isComplexDouble(); });
}

// Returns the C++ Meta kernel of a structured operator, or an invalid kernel: NOTE [C++ Meta kernels].
c10::KernelFunction structuredKernelOf(const OperatorHandle& op, const Stack& stack) {
  const auto device = meta_call_device;
  const bool is_real = !hasComplex(argumentsOf(op, stack));
  const bool is_shared =
      op.hasTag(at::Tag::pointwise) ? device && !device->is_meta() : device && device->is_cpu() && is_real;
  return is_shared && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional)
             ? overriddenKernelOf(op, DispatchKey::Meta)
             : c10::KernelFunction{};
}

// TensorIterators of more than two arguments refuse numbers on another device.
Tensor numberOnMeta(const Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  Tensor number = emptyOnMeta(tensor);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

void callKernel(const OperatorHandle& op, Stack& stack) {
  constexpr c10::DispatchKeySet kMeta{DispatchKey::Meta};
  if (const auto structured = structuredKernelOf(op, stack); structured.isValid()) {
    mapTensors(stack, op.schema().arguments().size(), numberOnMeta);
    structured.callBoxed(op, kMeta, &stack);
  } else {
    op.redispatchBoxed(kMeta, &stack);
  }
}

// Returns true if the operator has its own Meta kernel. PyTorch's fallback for the meta device (MetaFallbackKernel.cpp)
// would be found for every operator.
bool hasMetaKernel(const OperatorHandle& op) {
  constexpr std::array kKeys{DispatchKey::Meta, DispatchKey::CompositeImplicitAutograd,
                             DispatchKey::CompositeExplicitAutograd,
                             DispatchKey::CompositeExplicitAutogradNonFunctional};
  return std::any_of(kKeys.begin(), kKeys.end(), [&op](DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

}  // namespace

MetadataKernel metadataKernelFor(const OperatorHandle& op, const Stack& stack) {
  if (isComposedFactory(op, stack) || isComposedOperator(op) || isScatterIntoCopy(op)) {
    return MetadataKernel::kComposite;
  }
  if (hooks().kernels.replaces(op)) {
    return MetadataKernel::kOwn;
  }
  if (hasMetaKernel(op)) {
    return hasFakeImplementation(op) ? MetadataKernel::kFake : MetadataKernel::kMeta;
  }
  return !isRecording() && hooks().trials.mayRunOnZeros(op, stack) ? MetadataKernel::kZeros : MetadataKernel::kMissing;
}

bool hasFakeImplementation(const OperatorHandle& op) {
  return isPythonKernel(kernelOf(op, DispatchKey::Meta)) && !isKernelOfPyTorch(op, DispatchKey::Meta) &&
         interpreter().hasFakeImplementation(toString(op.operator_name()));
}

bool hasOnlyPythonMetaKernel(const OperatorHandle& op) {
  return isPythonKernel(kernelOf(op, DispatchKey::Meta)) && isKernelOfPyTorch(op, DispatchKey::Meta) &&
         !overriddenKernelOf(op, DispatchKey::Meta).isValid();
}

void callMetadataKernel(MetadataKernel kernel, c10::Device device, const OperatorHandle& op, Stack& stack) {
  const auto restore =
      c10::make_scope_exit([previous = std::exchange(meta_call_device, device)] { meta_call_device = previous; });
  hooks().kernels.callMeta(op, stack, [&](Stack& accepted) {
    if (kernel == MetadataKernel::kComposite) {
      op.callBoxedForDispatchKey(isScatterIntoCopy(op) ? DispatchKey::CompositeExplicitAutogradNonFunctional
                                                       : DispatchKey::CompositeExplicitAutograd,
                                 accepted);
    } else {
      callKernel(op, accepted);  // the dispatcher finds the program's, our own, or the fallback that raises an error
    }
  });
}

std::optional<c10::Device> deviceOfMetaCall() {
  return meta_call_device;
}

}  // namespace torchext
