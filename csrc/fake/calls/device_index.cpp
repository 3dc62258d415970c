#include "device_index.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchext {

using c10::Device;

Device withIndex(Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return Device{device.type()};
  }
  if (device.has_index()) {
    return device;
  }
  const auto* guard = c10::impl::device_guard_impl_registry[static_cast<std::size_t>(device.type())].load();
  return guard == nullptr ? Device{device.type(), 0} : Device{device.type(), guard->getDevice().index()};
}

}  // namespace torchext
