#pragma once

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>

#include <torchext/macros.h>

namespace torchext {

// The effect of a region on the arguments of an operator.
enum class CastPolicy : std::uint8_t {
  kLowerPrecision,  // casts them to the dtype of the region
  kFloat32,         // casts them to float32, or makes the operator compute in it
  kPromote,         // casts them to the widest dtype among them
  kFallthrough,     // nothing
  kBanned,          // raises an error
};

// Registers `policy` for the operators and device types, for the rest of the process. Arguments in double stay
// unchanged, as in PyTorch's policies. Raises a ValueError, and registers nothing, if an operator is unknown, writes
// into its arguments, returns views of them, or already has a policy from PyTorch or an earlier registration.
TORCHEXT_API void registerPolicy(const std::vector<c10::OperatorName>& operators,
                                 CastPolicy policy,
                                 const std::vector<c10::DeviceType>& device_types);

// Returns the policy of an operator, from PyTorch or a registration. Determined by a call of its kernel that ends
// before the operator runs: NOTE [Probing autocast kernels]. Raises a ValueError if the operator is unknown.
TORCHEXT_API CastPolicy policyOf(const c10::OperatorName& name, c10::DeviceType device_type);

}  // namespace torchext
