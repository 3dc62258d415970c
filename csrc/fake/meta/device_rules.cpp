#include "device_rules.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "../../support/stack_utils.h"
#include "../calls/device_index.h"
#include "../calls/op_traits.h"
#include "../cuda/fake_cuda.h"

namespace torchext {

using c10::Device;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// Operators whose tensor arguments may be on different devices. `copy_` copies between devices by definition, and so do
// operators that clone their first argument and copy into a view of the clone; the indexing kernels move their index
// tensors to the device of `self` (TensorAdvancedIndexing.cpp, `make_info`); `resize_as_` only looks at a shape.
constexpr std::array<std::string_view, 15> kMixesDevices{"aten::copy_",
                                                         "aten::copy",
                                                         "aten::_copy_from",
                                                         "aten::_foreach_copy_",
                                                         "aten::_foreach_copy",
                                                         "aten::as_strided_scatter",
                                                         "aten::diagonal_scatter",
                                                         "aten::select_scatter",
                                                         "aten::slice_scatter",
                                                         "aten::index",
                                                         "aten::index_put_",
                                                         "aten::index_put",
                                                         "aten::_unsafe_index",
                                                         "aten::_index_put_impl_",
                                                         "aten::resize_as_"};

// Of these, those that copy the values of their second argument by `copy_impl()`. So does `_to_copy`, of its only one.
constexpr std::array<std::string_view, 5> kCopiesSecond{"aten::copy_", "aten::copy", "aten::_foreach_copy_",
                                                        "aten::_foreach_copy", "aten::as_strided_scatter"};

// Operators whose kernels for the meta device check no device: weights on the meta device may be looked up with indices
// on the CPU.
constexpr std::array<std::string_view, 3> kLooksUpInMeta{"aten::embedding", "aten::_embedding_bag",
                                                         "aten::_embedding_bag_forward_only"};

bool isOnMeta(const c10::IValue& argument) {
  return hasTensor(argument, [](const at::Tensor& tensor) { return tensor.is_meta(); });
}

bool isCpuScalar(const at::Tensor& tensor) {
  return tensor.dim() == 0 && tensor.is_cpu();
}

}  // namespace

DeviceRules::DeviceRules(const OperatorHandle& op, const Stack& arguments) : op_{op}, stack_{arguments} {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect) || takesTensorOptions(op.schema())) {
    device_argument_ = findArgument(op.schema(), "device");
  }
}

Device DeviceRules::outputDevice() const {
  checkThatValuesExist();
  if (const auto device = explicitDevice()) {
    checkFakeCudaDevice(withIndex(*device));
    return withIndex(*device);
  }
  const Device device = commonDeviceOfTensors().value_or(Device{c10::kCPU});
  checkGenerators(device);
  return device;
}

// As `check_generator()` (Generator.h), which compares types of devices, and `randperm`, which compares devices.
// Kernels do not look at the generator if there is nothing to draw. Factories call an operator on their result.
void DeviceRules::checkGenerators(Device device) const {
  const auto arguments = topOf(stack_, op_.schema().arguments().size());
  const int training = findArgument(op_.schema(), "training");
  const bool draws = hasTensor(arguments, [](const at::Tensor& tensor) { return tensor.numel() > 0; }) &&
                     (training < 0 || arguments[static_cast<std::size_t>(training)].toBool());
  if (!draws || device.is_meta()) {
    return;
  }
  for (const c10::IValue& argument : arguments) {
    if (!argument.isGenerator()) {
      continue;
    }
    const Device found = argument.toGenerator().device();
    if (op_.schema().name() == "aten::randperm") {
      TORCH_CHECK(found == device, "Expected a '", device, "' generator device but found '", found, "'");
    }
    TORCH_CHECK(found.type() == device.type(), "Expected a '", device.type(), "' device type for generator but found '",
                found.type(), "'");
  }
}

std::optional<Device> DeviceRules::explicitDevice() const {
  if (device_argument_ < 0) {
    return std::nullopt;
  }
  const auto count = op_.schema().arguments().size();
  return torch::jit::peek(stack_, static_cast<std::size_t>(device_argument_), count).toOptional<Device>();
}

std::optional<Device> DeviceRules::commonDeviceOfTensors() const {
  std::optional<Device> common;
  std::optional<Device> scalar;
  const bool mixes = mixesDevices();
  const auto visit = [&](const at::Tensor& tensor) {
    if (isCpuScalar(tensor)) {
      scalar = tensor.device();
    } else if (!common) {
      common = tensor.device();
    } else {
      TORCH_CHECK(mixes || *common == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two "
                  "devices, ",
                  *common, " and ", tensor.device(), "! (when checking the arguments of ", op_.operator_name(), ")");
    }
  };
  forEachTensor(stack_, op_.schema().arguments().size(), visit);
  return common ? common : scalar;
}

// As `copy_impl()`. A fake stands for a tensor that has values, unless it is on the meta device.
void DeviceRules::checkThatValuesExist() const {
  const std::string& name = op_.schema().name();
  const auto argument = [this](std::size_t i) -> const c10::IValue& {
    return torch::jit::peek(stack_, i, op_.schema().arguments().size());
  };
  const bool is_lost = isAmong(kCopiesSecond, name) ? isOnMeta(argument(1)) && !isOnMeta(argument(0))
                                                    : name == "aten::_to_copy" && isOnMeta(argument(0)) &&
                                                          !explicitDevice().value_or(c10::kMeta).is_meta();
  TORCH_CHECK_NOT_IMPLEMENTED(!is_lost, "Cannot copy out of meta tensor; no data!");
}

bool DeviceRules::namesFakeDevice() const {
  const auto device = explicitDevice();
  return device && device->is_cuda() && fakeCudaDeviceCount() > 0;
}

bool DeviceRules::mixesDevices() const {
  const std::string& name = op_.schema().name();
  if (isAmong(kLooksUpInMeta, name)) {
    const c10::IValue& weight = torch::jit::peek(stack_, 0, op_.schema().arguments().size());
    return weight.isTensor() && weight.toTensor().is_meta();
  }
  return isAmong(kMixesDevices, name);
}

}  // namespace torchext
