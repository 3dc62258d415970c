#include "autocast_mode.h"

#include <ATen/autocast_mode.h>

namespace torchext::autocast {

using at::ScalarType;
using at::Tensor;
using c10::DeviceType;

bool is_autocast_available(DeviceType device_type) {
  return at::autocast::is_autocast_available(device_type);
}

bool is_autocast_enabled(DeviceType device_type) {
  return at::autocast::is_autocast_enabled(device_type);
}

void set_autocast_enabled(DeviceType device_type, bool is_enabled) {
  at::autocast::set_autocast_enabled(device_type, is_enabled);
}

ScalarType get_autocast_dtype(DeviceType device_type) {
  return at::autocast::get_autocast_dtype(device_type);
}

void set_autocast_dtype(DeviceType device_type, ScalarType dtype) {
  at::autocast::set_autocast_dtype(device_type, dtype);
}

bool is_autocast_cache_enabled() {
  return at::autocast::is_autocast_cache_enabled();
}

void set_autocast_cache_enabled(bool is_enabled) {
  at::autocast::set_autocast_cache_enabled(is_enabled);
}

void clear_cache() {
  at::autocast::clear_cache();
}

int increment_nesting() {
  return at::autocast::increment_nesting();
}

int decrement_nesting() {
  return at::autocast::decrement_nesting();
}

bool is_eligible(const Tensor& tensor, DeviceType device_type) {
  return at::autocast::is_eligible(tensor, device_type);
}

Tensor cached_cast(ScalarType dtype, const Tensor& tensor, DeviceType device_type) {
  return at::autocast::cached_cast(dtype, tensor, device_type);
}

c10::DispatchKey get_autocast_dispatch_key_from_device_type(DeviceType device_type) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device_type);
}

const std::vector<DeviceType>& supported_devices() {
  static const auto& all = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  static const std::vector<DeviceType> types{all.begin(), all.end()};
  return types;
}

}  // namespace torchext::autocast
