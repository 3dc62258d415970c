#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// Returns the device of the outputs of a call of `op` with the arguments on top of `stack`, without running it:
//
//   1. the `device` argument, if the operator selects its backend by it (it has a BackendSelect kernel);
//   2. the `device` argument, if the operator takes TensorOptions (`dtype`, `layout`, `device`, `pin_memory`);
//   3. the device of the tensor arguments. A CPU tensor without dimensions counts only if there is no other, because a
//      TensorIterator mixes it with any device unless it is written;
//   4. the CPU.
//
// A `device` argument that is None leaves the decision to the next rule.
//
// Raises PyTorch's errors: "Expected all tensors to be on the same device" if the operator does not mix the devices of
// the arguments, "Cannot copy out of meta tensor; no data!", and the errors for a generator or a storage of another
// device.
c10::Device outputDevice(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the position in the schema of the `device` argument of rules 1 and 2, or -1.
int deviceArgument(const c10::OperatorHandle& op);

// Returns true if the device argument names a CUDA device that does not exist: NOTE [Fake CUDA].
bool namesFakeDevice(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
