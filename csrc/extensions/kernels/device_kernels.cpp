#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>

#include "../../core/fake/cache/result_recipe.h"
#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/refused_dtypes.h"
#include "../support/registrations.h"
#include "device_checks.h"
#include "promoted_strides.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// NOTE [Zeros of forward AD]
//
// If forward AD needs a tangent that an argument does not have, PyTorch makes zeros without memory
// (`_efficientzerotensor`), which are immutable and carry the `ZeroTensor` key. Products with them are such zeros
// again, regardless of the other factor, so that infinities and NaNs do not appear. PyTorch's kernels on that key are
// above ours and also handle fakes, if fakes carry the key like the tensors that they represent (`kLazyBits`). A few
// operators fall through the key, and their kernels check for it. The functions below handle these.

bool hasZeroTensor(ArrayRef<IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor._is_zerotensor(); });
}

// Returns the key of the kernel that a call with these arguments runs on the fakes, because it calls another operator
// that returns such zeros: `mul.Scalar` calls `mul.Tensor`. None for views, which Meta kernels make.
std::optional<DispatchKey> kernelForZeroTensors(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr DispatchKey kComposite = DispatchKey::CompositeExplicitAutograd;
  return op.hasKernelForDispatchKey(kComposite) && !onlyMakesViews(op) && hasZeroTensor(arguments)
             ? std::optional{kComposite}
             : std::nullopt;
}

// `dot()` and `vdot()` in Blas.cpp.
// Replaces the meta result of a call whose kernel returns such zeros: `dot`.
void correctForZeroTensors(const OperatorHandle& op, ArrayRef<IValue> arguments, torch::jit::Stack& results) {
  constexpr std::array<std::string_view, 2> kReturnZeros{"aten::dot", "aten::vdot"};
  if (isAmong(kReturnZeros, op.operator_name().name) && hasZeroTensor(arguments)) {
    const Tensor& meta = results.front().toTensor();
    results.front() = at::_efficientzerotensor(meta.sizes(), meta.options());
  }
}

// Like `where_self_out()`.
const OperatorSet convertsByItself{"copy arguments to the common dtype before their kernel, on every device",
                                   {"aten::where"}};

// Found by test/cuda_host/test_layouts.py.
const OperatorSet hasOwnLayoutOnCuda{
    "lay out results differently on CUDA and on the CPU",
    {"aten::replication_pad2d", "aten::replication_pad2d_backward", "aten::replication_pad3d",
     "aten::replication_pad3d_backward", "aten::reflection_pad2d", "aten::reflection_pad2d_backward",
     "aten::reflection_pad3d", "aten::reflection_pad3d_backward", "aten::pixel_shuffle", "aten::log_sigmoid_forward",
     "aten::nonzero_static", "aten::_linalg_svd", "aten::linalg_eig", "aten::_fft_r2c"}};
const OperatorSet keepsFormatOnCpuOnly{
    "keep the memory format of their argument on the CPU, but not on CUDA",
    {"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
     "aten::_batch_norm_with_update", "aten::_batch_norm_no_update", "aten::native_batch_norm_backward",
     "aten::batch_norm_backward", "aten::max_unpool2d", "aten::channel_shuffle"}};

// oneDNN's LSTM has a workspace for its backward operator, in grad mode only. Only oneDNN can compute its size
// (`mkldnn_rnn_layer()` in RNN.cpp). The Meta kernel returns an empty one, and real kernels would read beyond it.
void sizeWorkspace(const OperatorHandle& op, Arguments arguments, c10::Device device, Stack& results) {
  if (!c10::GradMode::is_enabled()) {
    results.back() = Tensor{};
  } else if (const auto on_zeros = hooks().trials.describeOnZeros(op, arguments.vec(), device)) {
    results.back() = on_zeros->make(distinctTensors(arguments)).back();
  } else if (isRecording()) {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("Cannot determine the workspace size of `", op.operator_name(), "`."));
  }
}

// Corrects the results of the Meta kernel, on the meta device: for zeros of forward AD (NOTE [Zeros of forward AD]),
// and for the device that the fakes claim. Meta kernels ignore it when they choose the order of dimensions of
// elementwise operators (promoted_strides.h). torchext/fake/meta_overrides.py has the corrections that are needed less
// often.
void correctForDevice(const OperatorHandle& op, Arguments arguments, c10::Device device, Stack& results) {
  const auto& returns = op.schema().returns();
  if (std::any_of(returns.begin(), returns.end(), [](const auto& result) { return result.alias_info() != nullptr; })) {
    return;  // an `out` already has its strides
  }
  correctForZeroTensors(op, arguments, results);
  if (op.schema().name() == "aten::mkldnn_rnn_layer") {
    sizeWorkspace(op, arguments, device, results);
  } else if (device.is_cuda() && op.hasTag(at::Tag::pointwise) && !convertsByItself(op)) {
    giveStridesOfCuda(arguments, results);
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
  kernels.refuseDtypes = &refuseDtypes;
  kernels.hasLayoutOfCpu = [](const OperatorHandle& op) {
    return !hasOwnLayoutOnCuda(op) && !keepsFormatOnCpuOnly(op);
  };
  kernels.correct = &correctForDevice;
  kernels.compareDevices = &comparesDevices;
  hooks().decompositions.add(&kernelForZeroTensors);
}

}  // namespace torchext
