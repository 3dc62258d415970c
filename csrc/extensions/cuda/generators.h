#pragma once

#include <memory>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// The random generators of fake CUDA devices have the state of real ones (a seed and an offset). They draw nothing, but
// advance as real ones do: NOTE [Moves of CUDA generators].

// Returns a new generator of `device`.
at::Generator newFakeCudaGenerator(c10::DeviceIndex device);

// Returns the default generator of `device`.
TORCHEXT_API const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device);

// The follower of calls that advance the generator of a fake CUDA device. Null for operators that draw from no such
// generator on this thread, or that have no rule.
std::unique_ptr<CallFollower> followFakeCudaDraws(const c10::OperatorHandle& op,
                                                  const torch::jit::Stack& stack,
                                                  c10::function_ref<bool()> decomposes);

}  // namespace torchext
