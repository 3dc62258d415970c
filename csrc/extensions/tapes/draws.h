#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/random/tape.h"
#include "../../libraries/fills/fill.h"

namespace torchext {

// ---- Draws of the CPU generator ----

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

// ---- Replays of random fills ----

// Returns the distribution of the fills `op` that `fillRandomly()` computes, calling `after`; else nothing.
std::optional<Distribution> distributionOf(const c10::OperatorHandle& op);

using RequestedFill = std::variant<RandomFill, TruncatedFill>;

// Returns the fill of contiguous memory that a call of `op` on a tensor of `dtype` requests, or nothing if the operator
// must be called. PyTorch's truncated normal function may sample in another way for some bounds or in some release, so
// a few of its elements are compared with ours first.
std::optional<RequestedFill> requestedFillOf(const c10::OperatorHandle& op,
                                             c10::ScalarType dtype,
                                             c10::ArrayRef<c10::IValue> arguments);

// Computes the call of `op` with `stack` if it is a random fill of contiguous CPU memory that can be done faster than
// by PyTorch, with the same bits. `generator` is the one to draw from. Returns false, without an effect, if the caller
// must call the operator. `after` is as in fill.h, and is called for a distribution.
bool replayFill(const c10::OperatorHandle& op,
                torch::jit::Stack& stack,
                const at::Generator& generator,
                AfterStretch after = doNothing);

}  // namespace torchext
