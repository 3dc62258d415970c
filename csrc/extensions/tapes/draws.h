#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/random/tape.h"

namespace torchext {

// Returns true for a tensor whose elements fill a contiguous range of memory in order, unmodified. For a conjugate or
// negative view, PyTorch fills a copy and writes that back (MathBitsFallback.h).
bool isPlainlyContiguous(const at::Tensor& tensor);

// `Tape::takeDrawsOf()` for CPU generators. Null if the number of draws depends on values, or is unknown.
TapePositionPtr takeDrawsOf(const c10::OperatorHandle& op,
                            const torch::jit::Stack& stack,
                            const at::Generator& generator);

// Moves `generator` as far as `aten::<name>`, an operator that fills a tensor in place, would for a contiguous tensor
// of `numel` elements, given `numbers` between the tensor and the generator. Returns the number of draws. Raises
// ValueError for an operator whose number of draws is unknown.
TORCHEXT_API std::uint64_t skipFill(const std::string& name,
                                    int64_t numel,
                                    c10::ScalarType dtype,
                                    const std::vector<double>& numbers,
                                    const at::Generator& generator);

}  // namespace torchext
