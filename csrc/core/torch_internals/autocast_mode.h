#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

// The functions of `at::autocast`, by PyTorch's names. PyTorch's header for them includes all operators, which costs
// seven seconds of compile time per file, so one file includes it for all.
namespace torchext::autocast {

bool is_autocast_available(c10::DeviceType device_type);
bool is_autocast_enabled(c10::DeviceType device_type);
void set_autocast_enabled(c10::DeviceType device_type, bool is_enabled);
at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
void set_autocast_dtype(c10::DeviceType device_type, at::ScalarType dtype);
bool is_autocast_cache_enabled();
void set_autocast_cache_enabled(bool is_enabled);
void clear_cache();
int increment_nesting();
int decrement_nesting();

bool is_eligible(const at::Tensor& tensor, c10::DeviceType device_type);
at::Tensor cached_cast(at::ScalarType dtype, const at::Tensor& tensor, c10::DeviceType device_type);

// Raises for a device type without autocast, like all functions above that take one.
c10::DispatchKey get_autocast_dispatch_key_from_device_type(c10::DeviceType device_type);

// The device types with autocast. `is_autocast_available()` returns whether it works.
const std::vector<c10::DeviceType>& supported_devices();

}  // namespace torchext::autocast
