#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

// The functions of `at::autocast`, by PyTorch's names. PyTorch's header of them includes all operators there
// are, which takes the compiler seven seconds in each file, so one file includes it for all.
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

// Raises for a type of device that has no autocast, as all of those above do that are given one.
c10::DispatchKey get_autocast_dispatch_key_from_device_type(c10::DeviceType device_type);

// Those that have autocast. Whether it works is another question: `is_autocast_available()`.
const std::vector<c10::DeviceType>& supported_devices();

}  // namespace torchext::autocast
