#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// True for an operator that draws from a generator by itself, not through other operators.
bool drawsNumbers(const c10::OperatorHandle& op);

// Position in the schema of the argument that takes the generator, or -1.
int generatorArgument(const c10::FunctionSchema& schema);

// Moves `generator` as `op` would if it ran with `stack`, and returns how many 32-bit draws that were, where the answer
// can be told without running the operator. `stack` holds the arguments of an in-place operator; the first is the
// tensor to fill, which may be fake. Does nothing and returns false for an operator whose number of draws depends on
// values.
bool skipDrawsOf(const c10::OperatorHandle& op,
                 const torch::jit::Stack& stack,
                 const at::Generator& generator,
                 std::optional<std::uint64_t>& draws);

}  // namespace torchext
