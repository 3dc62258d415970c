#include "device_kernels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include "../../core/fake/cache/result_recipe.h"
#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/refused_dtypes.h"

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

// Replaces the meta result of a call whose kernel returns such zeros: `dot()` and `vdot()` in Blas.cpp.
void correctForZeroTensors(const OperatorHandle& op, ArrayRef<IValue> arguments, torch::jit::Stack& results) {
  constexpr std::array<std::string_view, 2> kReturnZeros{"aten::dot", "aten::vdot"};
  if (isAmong(kReturnZeros, op.operator_name().name) && hasZeroTensor(arguments)) {
    const Tensor& meta = results.front().toTensor();
    results.front() = at::_efficientzerotensor(meta.sizes(), meta.options());
  }
}

std::function<NativeFunctions()>& reader() {
  static auto* const read = new std::function<NativeFunctions()>;  // leaked: threads run operators until the end
  return *read;
}

// Several threads may read the names if they need them at the same time. A lock, or a static variable during its
// initialization, would stay locked in a child process forked in the meantime.
const NativeFunctions& namesOfOperators() {
  static std::atomic<const NativeFunctions*> names{nullptr};
  const NativeFunctions* known = names.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto read = std::make_unique<const NativeFunctions>(reader() ? reader()() : NativeFunctions{});
    if (names.compare_exchange_strong(known, read.get(), std::memory_order_acq_rel)) {
      return *read.release();
    }
  }
  return *known;
}

bool comparesDevices(const OperatorHandle& op) {
  return namesOfOperators().first.count(c10::toString(op.operator_name())) != 0;
}

// The order of dimensions in the results of elementwise operators on CUDA:
//
// A TensorIterator converts arguments whose dtype is not the common one. On the CPU and on the meta device it copies
// them first (`TensorIteratorBase::compute_types()`). The copy of an expanded tensor is contiguous, which can determine
// the order of the result's dimensions. CUDA kernels convert elements when loading them, so there the expanded tensor
// does not affect the order.

bool isExpanded(const Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

// Like the copies of TensorIteratorBase::compute_types().
std::vector<Tensor> converted(std::vector<Tensor> tensors, c10::ScalarType dtype) {
  for (Tensor& tensor : tensors) {
    if (tensor.scalar_type() != dtype) {
      tensor = at::empty_like(tensor, tensor.options().dtype(dtype));
    }
  }
  return tensors;
}

// Returns true if copies of the arguments could change the order.
bool mayDecideOrder(ArrayRef<IValue> arguments) {
  std::optional<c10::ScalarType> first;
  return allTensors(arguments, [](const Tensor& tensor) { return tensor.layout() == c10::kStrided; }) &&
         hasTensor(arguments, isExpanded) && hasTensor(arguments, [&first](const Tensor& tensor) {
           first = first.value_or(tensor.scalar_type());
           return tensor.scalar_type() != *first;
         });
}

// Gives the only result of an elementwise operator, computed by its Meta kernel, the strides that it has on CUDA.
void giveStridesOfCuda(ArrayRef<IValue> arguments, Stack& results) {
  if (results.size() != 1 || !results.front().isTensor() || !mayDecideOrder(arguments)) {
    return;
  }
  std::vector<Tensor> tensors;
  forEachTensor(arguments, [&tensors](const Tensor& tensor) { tensors.push_back(emptyOnMeta(tensor)); });
  const Tensor& result = results.front().toTensor();
  const Tensor of_copies = resultOfIterator(converted(tensors, at::native::result_type(tensors)), result.scalar_type());
  // Some Meta kernels are formulas of several steps and computed the result differently.
  if (of_copies.sizes() == result.sizes() && of_copies.strides() == result.strides()) {
    results.front() = resultOfIterator(tensors, result.scalar_type());
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
// elementwise operators. torchext/fake/meta_overrides.py has the corrections that are needed less often.
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

void setNativeFunctions(std::function<NativeFunctions()> read) {
  reader() = std::move(read);
}

bool sharesKernels(const OperatorHandle& op) {
  return namesOfOperators().second.count(c10::toString(op.operator_name())) != 0;
}

std::optional<DispatchKey> kernelForSeveralDevices(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr DispatchKey kSlow = DispatchKey::CompositeExplicitAutograd;
  if (op.schema().name().rfind("aten::_foreach_", 0) != 0 || !op.hasKernelForDispatchKey(kSlow)) {
    return std::nullopt;
  }
  std::optional<c10::Device> first;
  const bool differs = std::any_of(arguments.begin(), arguments.end(), [&first](const IValue& argument) {
    return argument.isTensorList() && hasTensor(argument, [&first](const Tensor& tensor) {
             first = first.value_or(tensor.device());
             return *first != tensor.device();
           });
  });
  return differs ? std::optional{kSlow} : std::nullopt;
}

Tensor resultOfIterator(ArrayRef<Tensor> tensors, c10::ScalarType dtype) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).declare_static_dtype_and_device(dtype, c10::kMeta).add_owned_output(Tensor{});
  for (const Tensor& tensor : tensors) {
    config.add_owned_const_input(emptyOnMeta(tensor));
  }
  return config.build().output();
}

}  // namespace torchext
