#pragma once

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>

#include <torchext/macros.h>

namespace torchext {

// What an operator does to its arguments in a region before it runs.
enum class CastPolicy : std::uint8_t {
  kLowerPrecision,  // casts them to the dtype of the region
  kFloat32,         // casts them to float32, or is told to compute in it
  kPromote,         // casts them to the widest dtype among them
  kFallthrough,     // nothing
  kBanned,          // refuses to run
};

// Lets the operators follow `policy` for tensors on the device types, for the rest of the process. Arguments in double
// are left as they are, as PyTorch's policies do. Raises a ValueError, and registers nothing, when an operator is
// unknown, writes into its arguments or returns views of them, or is treated already, by PyTorch or by an earlier
// registration.
TORCHEXT_API void registerPolicy(const std::vector<c10::OperatorName>& operators,
                                 CastPolicy policy,
                                 const std::vector<c10::DeviceType>& device_types);

// Tells how an operator is treated, by PyTorch or by a registration. Found out by asking its kernel: it is called, and
// what it makes of its arguments is looked at before the operator runs. Raises a ValueError when it is unknown.
TORCHEXT_API CastPolicy policyOf(const c10::OperatorName& name, c10::DeviceType device_type);

}  // namespace torchext
