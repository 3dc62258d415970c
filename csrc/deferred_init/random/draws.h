#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "tape.h"

namespace torchext {

// Returns true for a tensor whose elements fill a stretch of memory in order, and are what memory holds. Of a conjugate
// or negative view PyTorch fills a copy, and then writes that back (MathBitsFallback.h).
bool isPlainlyContiguous(const at::Tensor& tensor);

// `Tape::takeDrawsOf()` for CPU generators. Null where the number of draws depends on values, or is not known.
TapePositionPtr takeDrawsOf(const c10::OperatorHandle& op,
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
