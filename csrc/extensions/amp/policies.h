#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// The effect of a region on the arguments of an operator. In the order of torchext/amp/__init__.py.
enum class CastPolicy : std::uint8_t {
  kLowerPrecision,  // casts them to the dtype of the region
  kFloat32,         // casts them to float32, or makes the operator compute in it
  kPromote,         // casts them to the widest dtype among them
  kFallthrough,     // nothing
  kBanned,          // raises an error
};

// Registers `policy` for operators, given by their names and overloads, and device types, for the rest of the process.
// Arguments in double stay unchanged, as in PyTorch's policies. Raises a ValueError, and registers nothing, if an
// operator is unknown, writes into its arguments, returns views of them, or already has a policy from PyTorch or an
// earlier registration.
TORCHEXT_API void registerPolicy(const std::vector<std::pair<std::string, std::string>>& operators,
                                 CastPolicy policy,
                                 const std::vector<c10::Device>& devices);

// Returns the policy of an operator, from PyTorch or a registration. Determined by a call of its kernel that ends
// before the operator runs: NOTE [Probing autocast kernels]. Raises a ValueError if the operator is unknown.
TORCHEXT_API CastPolicy policyOf(const c10::OperatorName& name, c10::DeviceType device_type);

// NOTE [Probing autocast kernels]
//
// PyTorch has no readable list of its policies: each is compiled into the kernel of an operator. That kernel casts the
// arguments and calls the operator again, from the top of the dispatcher. So it is called with fake tensors of known
// dtypes, which cost nothing, and with the key of marked tensors enabled in the thread. The handler of that key then
// receives the operator with cast arguments, records their dtypes, and ends the call before the operator runs.

// For the handler: ends the call, by an exception, if this thread runs a probe of `op`.
void inspectProbedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
