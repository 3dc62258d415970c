#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "rng_tape.h"

namespace torchext {

// Returns true for an operator that draws from a generator by itself, not through other operators.
bool drawsNumbers(const c10::OperatorHandle& op);

// Position in the schema of the argument that takes the generator, or -1.
int generatorArgument(const c10::FunctionSchema& schema);

// Returns true for a tensor whose elements fill a stretch of memory in order, and are what memory holds. Of a conjugate
// or negative view PyTorch fills a copy, and then writes that back (MathBitsFallback.h).
bool isPlainlyContiguous(const at::Tensor& tensor);

// Moves `generator` as `op` would if it ran with `stack`, and returns its previous position, if that can be done
// without running the operator. `stack` holds the arguments; tensors among them may be fake. Does nothing and returns
// nullopt for an operator whose number of draws depends on values, or is not known.
std::optional<TapePosition> takeDrawsOf(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack,
                                        const at::Generator& generator);

// Moves `generator` as `aten::<name>`, an operator that fills a tensor in place, would if it filled a contiguous one of
// `numel` elements, given `numbers` between the tensor and the generator. Returns the number of draws. Raises
// ValueError for an operator for which that is not known.
TORCHEXT_API std::uint64_t skipFill(const std::string& name,
                                    int64_t numel,
                                    c10::ScalarType dtype,
                                    const std::vector<double>& numbers,
                                    const at::Generator& generator);

}  // namespace torchext
