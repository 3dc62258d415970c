#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchext {

// Returns the device on which a factory with the argument `device` makes tensors: "cuda" becomes the current CUDA
// device, "cpu:0" becomes "cpu".
inline c10::Device withIndex(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return c10::Device{device.type()};
  }
  if (device.has_index()) {
    return device;
  }
  const bool has_current = c10::impl::hasDeviceGuardImpl(device.type());
  return has_current ? c10::impl::getDeviceGuardImpl(device.type())->getDevice() : c10::Device{device.type(), 0};
}

// Makes a device current while it exists, as the dispatcher's entries of backend kernels do: these kernels make tensors
// on the current device. Has no effect on types of devices that this process cannot switch.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device)
      : guard_{c10::impl::hasDeviceGuardImpl(device.type()) ? withIndex(device) : c10::Device{c10::kCPU}} {}

 private:
  c10::DeviceGuard guard_;
};

}  // namespace torchext
