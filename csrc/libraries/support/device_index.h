#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

namespace torchext {

// Returns the device on which a factory with the argument `device` makes tensors: "cuda" becomes the current CUDA
// device, "cpu:0" becomes "cpu".
c10::Device withIndex(c10::Device device);

// Makes a device current while it exists, as the dispatcher's entries of backend kernels do: these kernels make tensors
// on the current device. Has no effect on types of devices that this process cannot switch.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);

 private:
  c10::OptionalDeviceGuard guard_;
};

}  // namespace torchext
