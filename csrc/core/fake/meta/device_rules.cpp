#include "device_rules.h"

#include <string>

#include "../../../libraries/support/device_index.h"
#include "../../../libraries/support/operator_table.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../calls/op_traits.h"
#include "meta_kernel.h"

namespace torchext {

using c10::Device;

namespace {

// Operators whose tensor arguments may be on different devices. `copy_` copies between devices by definition, as do
// operators that clone their first argument and copy into a view of the clone. Indexing kernels move their indices to
// the device of `self` (TensorAdvancedIndexing.cpp, `make_info`). `fill_` reads a value on another device as a number,
// `resize_as_` reads only a shape, and the choice of a kernel for `ctc_loss` reads lengths on the CPU.
const OperatorSet mayMixDevices{
    "take tensors on different devices",
    {"aten::copy_", "aten::copy", "aten::_copy_from", "aten::as_strided_scatter", "aten::diagonal_scatter",
     "aten::select_scatter", "aten::slice_scatter", "aten::index", "aten::index_put_", "aten::index_put",
     "aten::_unsafe_index", "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::fill", "aten::fill_",
     "aten::resize_as_", "aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss"}};

// The subset that copies the values of the second argument with `copy_impl()`. `_to_copy` does so with its only one.
const OperatorSet copiesSecond{"copy the values of their second argument with `copy_impl()`",
                               {"aten::copy_", "aten::copy", "aten::as_strided_scatter"}};

// Operators whose meta kernels check no device: weights on the meta device may be looked up with indices on the CPU.
const OperatorSet looksUpInMeta{"look up rows of weights on the meta device with indices on any device",
                                {"aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"}};

const OperatorSet readsByIndex{"read by indices on the device of the indexed tensor or on the CPU",
                               {"aten::index", "aten::_unsafe_index"}};
const OperatorSet writesByIndex{
    "write by indices, which they move to the device of the written tensor",
    {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"}};

bool onlyMasks(const c10::IValue& indices) {
  return !hasTensor(indices, [](const at::Tensor& index) {
    return index.scalar_type() != c10::kBool && index.scalar_type() != c10::kByte;
  });
}

bool isOnMeta(const c10::IValue& argument) {
  return hasTensor(argument, [](const at::Tensor& tensor) { return tensor.is_meta(); });
}

bool isCpuScalar(const at::Tensor& tensor) {
  return tensor.dim() == 0 && tensor.is_cpu();
}

std::optional<Device> explicitDevice(const OperatorHandle& op, const Stack& stack) {
  const int position = deviceArgument(op);
  return position < 0 ? std::nullopt : argumentsOf(op, stack)[toSize(position)].toOptional<Device>();
}

bool mixesDevices(const OperatorHandle& op, const Stack& stack) {
  if (looksUpInMeta(op)) {
    const c10::IValue& weight = argumentsOf(op, stack)[0];
    return weight.isTensor() && weight.toTensor().is_meta();
  }
  return mayMixDevices(op) || hasFakeImplementation(op);
}

// Like `checkSetStorage()` (Resize.h), for the storage that `set_` gives to a tensor.
void checkSource(const OperatorHandle& op, const Stack& stack, Device device) {
  for (const c10::IValue& argument : argumentsOf(op, stack)) {
    if (argument.isStorage()) {
      const Device found = argument.toStorage().device();
      TORCH_CHECK(found == device, "Attempted to set the storage of a tensor on device \"", device,
                  "\" to a storage on different device \"", found,
                  "\".  This is no longer allowed; the devices must match.");
    }
  }
}

// Like `check_generator()` (Generator.h) and `randperm`, which has a different message. A CUDA generator may have no
// index. Kernels ignore the generator if there is nothing to draw. Factories call an operator on their result.
void checkGenerators(const OperatorHandle& op, const Stack& stack, Device device) {
  if (device.is_meta() || !takesGenerator(op) || namespaceOf(op.operator_name()) != "aten") {
    return;
  }
  const auto arguments = argumentsOf(op, stack);
  const c10::IValue& training = argumentNamed(op, arguments, "training");
  const bool draws = hasTensor(arguments, [](const at::Tensor& tensor) { return tensor.numel() > 0; }) &&
                     (training.isNone() || training.toBool());
  if (!draws) {
    return;
  }
  for (const c10::IValue& argument : arguments) {
    if (!argument.isGenerator()) {
      continue;
    }
    const Device found = argument.toGenerator().device();
    if (op.schema().name() == "aten::randperm") {
      TORCH_CHECK(found.type() == device.type(), "Expected a '", device, "' generator device but found '", found, "'");
    }
    TORCH_CHECK(found.type() == device.type(), "Expected a '", device.type(), "' device type for generator but found '",
                found.type(), "'");
  }
}

// Raises for a CPU tensor without dimensions that does not mix with `common`: a written one, as
// `TensorIteratorBase::compute_types()` does, or any that is compared: NOTE [Operators that compare devices].
void refuseNumber(const OperatorHandle& op, const Stack& stack, Device number, Device common) {
  const auto& declared = op.schema().arguments();
  const auto arguments = topOf(stack, declared.size());
  const bool compares = hooks().kernels.compareDevices(op);
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const bool is_compared = compares && (!declared[i].kwarg_only() || declared[i].is_out());
    const bool is_written = isWritten(declared[i]) && arguments[i].isTensor();
    TORCH_CHECK(!(is_compared || is_written) || !hasTensor(arguments[i], isCpuScalar),
                "Expected all tensors to be on the same device, but found at least two devices, ", common, " and ",
                number, "! (when checking argument `", declared[i].name(), "` of ", op.operator_name(), ")");
  }
}

std::optional<Device> commonDeviceOfTensors(const OperatorHandle& op, const Stack& stack) {
  std::optional<Device> common;
  std::optional<Device> scalar;
  const auto visit = [&](const at::Tensor& tensor) {
    if (isCpuScalar(tensor)) {
      scalar = tensor.device();
    } else if (!common) {
      common = tensor.device();
    } else {
      TORCH_CHECK(*common == tensor.device() || mixesDevices(op, stack),
                  "Expected all tensors to be on the same device, but found at least two "
                  "devices, ",
                  *common, " and ", tensor.device(), "! (when checking the arguments of ", op.operator_name(), ")");
    }
  };
  forEachTensor(argumentsOf(op, stack), visit);
  if (common && scalar && common->is_cuda() && !mixesDevices(op, stack)) {
    refuseNumber(op, stack, *scalar, *common);
  }
  return common ? common : scalar;
}

// Like the indexing kernels: `check_indices_on_cpu_or_selfdevice()` and `_index_put_impl_()`
// (TensorAdvancedIndexing.cpp). The latter moves indices to the device of `self`, and numbers as well.
void checkIndices(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = argumentsOf(op, stack);
  if (readsByIndex(op)) {
    const Device device = arguments[0].toTensor().device();
    TORCH_CHECK(device.is_meta() || !hasTensor(arguments[1],
                                               [device](const at::Tensor& index) {
                                                 return !index.is_cpu() && index.device() != device;
                                               }),
                "indices should be either on cpu or on the same device as the indexed tensor (", device, ")");
  } else if (writesByIndex(op)) {
    const Device device = arguments[0].toTensor().device();
    const at::Tensor& value = arguments[2].toTensor();
    const bool is_number = value.dim() == 0 || (value.numel() == 1 && value.is_cpu() && onlyMasks(arguments[1]) &&
                                                !arguments[3].toBool());  // `canDispatchToMaskedFill()`
    TORCH_CHECK(device.is_meta() || is_number || value.device() == device,
                "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                value.device(), "! (when checking the arguments of ", op.operator_name(), ")");
  }
}

// Like `copy_impl()`. A fake represents a tensor with values, unless it is on the meta device.
void checkThatValuesExist(const OperatorHandle& op, const Stack& stack) {
  const std::string& name = op.schema().name();
  const auto arguments = argumentsOf(op, stack);
  const bool is_lost = copiesSecond(op) ? isOnMeta(arguments[1]) && !isOnMeta(arguments[0])
                                        : name == "aten::_to_copy" && isOnMeta(arguments[0]) &&
                                              !explicitDevice(op, stack).value_or(c10::kMeta).is_meta();
  TORCH_CHECK_NOT_IMPLEMENTED(!is_lost, "Cannot copy out of meta tensor; no data!");
}

}  // namespace

Device outputDevice(const OperatorHandle& op, const Stack& stack) {
  checkThatValuesExist(op, stack);
  checkIndices(op, stack);
  if (const auto device = explicitDevice(op, stack)) {
    hooks().devices.check(withIndex(*device));
    return withIndex(*device);
  }
  const Device device = commonDeviceOfTensors(op, stack).value_or(Device{c10::kCPU});
  checkGenerators(op, stack, device);
  checkSource(op, stack, device);
  return device;
}

int deviceArgument(const OperatorHandle& op) {
  const bool has_rule = op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect) || takesTensorOptions(op.schema());
  return has_rule ? findArgument(op.schema(), "device") : -1;
}

bool namesFakeDevice(const OperatorHandle& op, const Stack& stack) {
  const auto device = explicitDevice(op, stack);
  return device && device->is_cuda() && hooks().devices.count() > 0;
}

}  // namespace torchext
