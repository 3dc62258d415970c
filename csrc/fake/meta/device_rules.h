#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// Decides on which device the outputs of an operator are, without running it:
//
//   1. an operator that selects its backend by a `device` argument (it has a BackendSelect kernel) makes its outputs
//      there;
//   2. so does one that takes TensorOptions (`dtype`, `layout`, `device`, `pin_memory`);
//   3. otherwise they are where the tensor arguments are; a CPU tensor without dimensions counts only when there is no
//      other, because a TensorIterator mixes such a tensor with any device, unless it is written;
//   4. otherwise on the CPU.
//
// A `device` argument that is None leaves the decision to the next rule.
class DeviceRules {
 public:
  DeviceRules(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

  // Raises PyTorch's "Expected all tensors to be on the same device" if the arguments are on devices that the operator
  // does not mix, its "Cannot copy out of meta tensor; no data!", and what it raises for a generator or a storage of
  // another device.
  c10::Device outputDevice() const;

  // Returns the position in the schema of the `device` argument of rules 1 and 2, or -1.
  int deviceArgument() const noexcept {
    return device_argument_;
  }

  // Returns true if the device argument names a CUDA device that does not exist: NOTE [CUDA without CUDA].
  bool namesFakeDevice() const;

 private:
  std::optional<c10::Device> explicitDevice() const;
  std::optional<c10::Device> commonDeviceOfTensors() const;
  bool mixesDevices() const;
  void checkThatValuesExist() const;
  void checkGenerators(c10::Device device) const;
  void checkIndices() const;
  void checkSource(c10::Device device) const;
  void refuseNumber(c10::Device number, c10::Device common) const;

  const c10::OperatorHandle& op_;
  const torch::jit::Stack& stack_;
  int device_argument_ = -1;
};

}  // namespace torchext
