#pragma once

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
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

// NOTE [Probing autocast kernels]
//
// PyTorch has no readable list of its policies: each is compiled into the kernel of an operator. That kernel casts the
// arguments and calls the operator again, from the top of the dispatcher. So it is called with fake tensors of known
// dtypes, which cost nothing, and with the key of marked tensors enabled in the thread. The handler of that key then
// receives the operator with cast arguments, records their dtypes, and ends the call before the operator runs.

// How the kernel that `op` has on the key of autocast treats its arguments.
CastPolicy probeKernel(const c10::OperatorHandle& op, c10::DeviceType device_type);

// Returns true if this thread runs a probe. For the handler.
bool isProbingKernel() noexcept;

// Ends the call, by an exception, if `op` is the probed operator.
void inspectProbedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
