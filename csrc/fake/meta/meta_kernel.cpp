#include "meta_kernel.h"

#include <algorithm>
#include <array>
#include <string>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>

#include "../../support/operator_table.h"
#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../../torch_internals/dispatcher_internals.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "device_hints.h"
#include "own_kernels.h"
#include "promoted_strides.h"
#include "zeros_call.h"

namespace torchext {

using c10::DispatchKey;

namespace {

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
         !op.hasKernelForDispatchKey(DispatchKey::CPU) && isFactory(op, topOf(stack, op.schema().arguments().size()));
}

bool isRangeBetweenTensors(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return (name == "aten::linspace" || name == "aten::logspace") && !op.schema().overload_name().empty();
}

bool hasComplex(c10::ArrayRef<c10::IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_complex(); }) ||
         std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::IValue& value) { return value.isComplexDouble(); });
}

// Infers a complex dtype. Eagerly, the bounds are read as numbers before the dtype is inferred (`linspace()`,
// TensorFactories.cpp).
void inferDtype(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  const int position = findArgument(op.schema(), "dtype");
  if (position < 0) {
    return;  // the overload has an `out`
  }
  c10::IValue& dtype = torch::jit::peek(stack, toSize(position), count);
  if (dtype.isNone() && hasComplex(topOf(stack, count))) {
    dtype = c10::typeMetaToScalarType(c10::get_default_complex_dtype());
  }
}

// Replaces arguments that Meta kernels refuse, but real kernels accept, by equivalent ones.
void putAcceptedArguments(const OperatorHandle& op, Stack& stack) {
  const std::string& name = op.schema().name();
  const std::size_t count = op.schema().arguments().size();
  if (name == "aten::where" && topOf(stack, count)[0].isTensor()) {
    IValue& condition = torch::jit::peek(stack, 0, count);
    const Tensor tensor = condition.toTensor();
    if (tensor.scalar_type() == c10::kByte) {
      condition = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().dtype(c10::kBool));
    }
  } else if (name == "aten::nll_loss_forward") {  // a single target, for an input without a batch
    IValue& target = torch::jit::peek(stack, 1, count);
    const Tensor tensor = target.toTensor();
    if (topOf(stack, count)[0].toTensor().dim() == 1 && tensor.dim() == 1 && tensor.size(0) == 1) {
      target = tensor.select(0, 0);
    }
  }
}

// The Meta kernels of these are PyTorch's Python references, which lose the order of strides. Eagerly, a TensorIterator
// over the first two arguments determines it.
const OperatorSet isLaidOutByIterator{"derive strides from a TensorIterator over their first two arguments",
                                      {"aten::floor_divide", "aten::native_dropout_backward"},
                                      Overloads::kNamed};

// These return a contiguous result (`normal_impl()`, DistributionTemplates.h; `_s_poisson_cpu`, Distributions.cpp), but
// their Meta kernels return one with the strides of the argument.
const OperatorSet isLaidOutContiguously{
    "return a contiguous result",
    {"aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor", "aten::poisson"},
    Overloads::kNamed};

// Returns the C++ Meta kernel of a structured operator, or an invalid kernel: NOTE [C++ Meta kernels].
c10::KernelFunction structuredKernelOf(const OperatorHandle& op, const Stack& stack) {
  const auto device = deviceOfMetaCall();
  const bool is_real = !hasComplex(topOf(stack, op.schema().arguments().size()));
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

void callLaidOutByIterator(const OperatorHandle& op, Stack& stack) {
  const auto arguments = topOf(stack, op.schema().arguments().size());
  const Tensor a = arguments[0].toTensor();
  const Tensor b = arguments[1].toTensor();
  callKernel(op, stack);
  const auto dtype = stack.back().toTensor().scalar_type();
  stack.back() = resultOfIterator({a, b}, dtype);
}

void callLaidOutContiguously(const OperatorHandle& op, Stack& stack) {
  callKernel(op, stack);
  const Tensor& result = stack.back().toTensor();
  stack.back() = at::empty(result.sizes(), result.options());
}

// These fill an `out` of any shape that has the right number of elements (RangeFactories.cpp). Their Meta kernels
// resize it to one dimension.
const OperatorSet makesRange{
    "fill an `out` of any shape with the right number of elements",
    {"aten::arange", "aten::range", "aten::linspace", "aten::logspace", "aten::fft_fftfreq", "aten::fft_rfftfreq"}};

bool fillsRangeIntoOut(const OperatorHandle& op) {
  return makesRange(op) && op.schema().arguments().back().is_out();
}

void callOnFlatOut(const OperatorHandle& op, Stack& stack) {
  const Tensor out = stack.back().toTensor();
  const Tensor flat = at::empty({out.numel()}, out.options());
  stack.back() = flat;
  callKernel(op, stack);
  if (flat.numel() != out.numel()) {
    out.resize_(flat.sizes());
  }
  stack.back() = out;
}

void callMetaKernel(const OperatorHandle& op, Stack& stack) {
  if (isLaidOutByIterator(op)) {
    callLaidOutByIterator(op, stack);
  } else if (isLaidOutContiguously(op)) {
    callLaidOutContiguously(op, stack);
  } else if (fillsRangeIntoOut(op)) {
    callOnFlatOut(op, stack);
  } else {
    callKernel(op, stack);
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
  if (hasOwnKernel(op)) {
    return MetadataKernel::kOwn;
  }
  if (hasMetaKernel(op)) {
    return MetadataKernel::kMeta;
  }
  return !isRecording() && mayRunOnZeros(op, stack) ? MetadataKernel::kZeros : MetadataKernel::kMissing;
}

bool hasOnlyPythonMetaKernel(const OperatorHandle& op) {
  return isPythonKernel(kernelOf(op, DispatchKey::Meta)) && isKernelOfPyTorch(op, DispatchKey::Meta) &&
         !overriddenKernelOf(op, DispatchKey::Meta).isValid();
}

void callMetadataKernel(MetadataKernel kernel, const OperatorHandle& op, Stack& stack) {
  if (isRangeBetweenTensors(op)) {
    inferDtype(op, stack);
  }
  putAcceptedArguments(op, stack);
  switch (kernel) {
    case MetadataKernel::kMeta:
    case MetadataKernel::kZeros:
    case MetadataKernel::kMissing:
      callMetaKernel(op, stack);
      break;
    case MetadataKernel::kComposite:
      op.callBoxedForDispatchKey(isScatterIntoCopy(op) ? DispatchKey::CompositeExplicitAutogradNonFunctional
                                                       : DispatchKey::CompositeExplicitAutograd,
                                 stack);
      break;
    case MetadataKernel::kOwn:
      callOwnKernel(op, stack);
  }
}

}  // namespace torchext
