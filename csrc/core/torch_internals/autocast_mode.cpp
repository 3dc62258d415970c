#include "autocast_mode.h"

#include <ATen/autocast_mode.h>

namespace torchext::autocast {

using c10::DeviceType;

bool is_eligible(const at::Tensor& tensor, DeviceType device_type) {
  return at::autocast::is_eligible(tensor, device_type);
}

c10::DispatchKey get_autocast_dispatch_key_from_device_type(DeviceType device_type) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device_type);
}

bool is_autocast_available(DeviceType device_type) {
  return at::autocast::is_autocast_available(device_type);
}

const std::vector<DeviceType>& supported_devices() {
  static const auto& all = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  static const std::vector<DeviceType> types{all.begin(), all.end()};
  return types;
}

}  // namespace torchext::autocast
