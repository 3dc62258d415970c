#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

// The functions of `at::autocast`, by PyTorch's names. PyTorch's header for them includes all operators, which costs
// seven seconds of compile time per file. So its functions are declared again here. A declaration that differs does not
// compile or not link: autocast_mode.cpp includes both headers. It also defines the functions that are inline there.

namespace at::autocast {

TORCH_API bool is_autocast_enabled(c10::DeviceType device_type);
TORCH_API void set_autocast_enabled(c10::DeviceType device_type, bool enabled);
TORCH_API at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API void set_autocast_dtype(c10::DeviceType device_type, at::ScalarType dtype);
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
TORCH_API void clear_cache();
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);

}  // namespace at::autocast

namespace torchext::autocast {

using namespace at::autocast;

bool is_eligible(const at::Tensor& tensor, c10::DeviceType device_type);

// Raises for a device type without autocast, like all functions above that take one.
c10::DispatchKey get_autocast_dispatch_key_from_device_type(c10::DeviceType device_type);

// The device types with autocast. `is_autocast_available()` returns whether it works.
bool is_autocast_available(c10::DeviceType device_type);
const std::vector<c10::DeviceType>& supported_devices();

}  // namespace torchext::autocast
