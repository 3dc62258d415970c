#include "device_kernels.h"

#include <algorithm>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/meta/meta_kernel.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/refused_dtypes.h"
#include "device_checks.h"
#include "device_hints.h"
#include "kernel_results.h"
#include "own_kernels.h"
#include "promoted_strides.h"

namespace torchext {

namespace {

bool isRangeBetweenTensors(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return (name == "aten::linspace" || name == "aten::logspace") && !op.schema().overload_name().empty();
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

void callLaidOutByIterator(const OperatorHandle& op, Stack& stack, CallOnStack call) {
  const auto arguments = topOf(stack, op.schema().arguments().size());
  const Tensor a = arguments[0].toTensor();
  const Tensor b = arguments[1].toTensor();
  call(stack);
  const auto dtype = stack.back().toTensor().scalar_type();
  stack.back() = resultOfIterator({a, b}, dtype);
}

void callLaidOutContiguously(Stack& stack, CallOnStack call) {
  call(stack);
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

void callOnFlatOut(Stack& stack, CallOnStack call) {
  const Tensor out = stack.back().toTensor();
  const Tensor flat = at::empty({out.numel()}, out.options());
  stack.back() = flat;
  call(stack);
  if (flat.numel() != out.numel()) {
    out.resize_(flat.sizes());
  }
  stack.back() = out;
}

void callMeta(const OperatorHandle& op, Stack& stack, CallOnStack call) {
  if (isRangeBetweenTensors(op)) {
    inferDtype(op, stack);
  }
  putAcceptedArguments(op, stack);
  if (isLaidOutByIterator(op)) {
    callLaidOutByIterator(op, stack, call);
  } else if (isLaidOutContiguously(op)) {
    callLaidOutContiguously(stack, call);
  } else if (fillsRangeIntoOut(op)) {
    callOnFlatOut(stack, call);
  } else {
    call(stack);
  }
}

void refuseDtypes(const OperatorHandle& op, Arguments arguments, Arguments results, c10::Device device) {
  if (device.is_cuda()) {
    refuseDtypesOnCuda(op, arguments, results);
  }
}

}  // namespace

void registerDeviceKernels() {
  DeviceKernels& kernels = hooks().kernels;
  kernels.replaces = &hasOwnKernel;
  kernels.runReplacement = &callOwnKernel;
  kernels.callMeta = &callMeta;
  kernels.refuseDtypes = &refuseDtypes;
  kernels.hasLayoutOfCpu = &hasLayoutOfCpu;
  kernels.correct = &correctForDevice;
  kernels.complete = &completeResults;
  kernels.compareDevices = &comparesDevices;
}

}  // namespace torchext
