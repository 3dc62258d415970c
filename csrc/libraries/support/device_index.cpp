#include "device_index.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchext {

using c10::Device;

namespace {

// Returns null for a type of devices that this process cannot switch.
const c10::impl::DeviceGuardImplInterface* guardOf(Device device) {
  return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(device.type())].load();
}

}  // namespace

Device withIndex(Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return Device{device.type()};
  }
  if (device.has_index()) {
    return device;
  }
  const auto* guard = guardOf(device);
  return guard == nullptr ? Device{device.type(), 0} : Device{device.type(), guard->getDevice().index()};
}

OnDevice::OnDevice(Device device) {
  if (guardOf(device) != nullptr) {
    guard_.reset_device(withIndex(device));
  }
}

}  // namespace torchext
