#pragma once

// Converts recorded operators to readable text.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/plan/replay_plan.h"

namespace torchext {

// A value that an operator has left in a storage, as a tensor that shows all of it that is known to be used.
struct ExplainedValue {
  // The values of an explanation are numbered from 0, in the order in which they are made.
  std::int64_t number = 0;
  std::vector<std::int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

struct ExplainedOperation {
  // For example `aten::uniform_`; or `constant` for values without an operator, such as those of `torch.tensor()`.
  std::string name;
  // The call with its arguments, without its outputs: `aten::uniform_(%0, -0.5, 0.5)`.
  std::string call;
  // The numbers of the values that it reads, in the order of its arguments.
  std::vector<std::int64_t> reads;
  std::vector<ExplainedValue> writes;
  // The start position on the tape of its generator, and the number of draws if it was known without running the
  // operator: `TapePosition::draws()` and `length()`.
  std::optional<std::uint64_t> generator_offset;
  std::optional<std::uint64_t> draws;
  // The source line that recorded it. Empty without tracing.
  std::string source;
  // False if its outputs are not read: NOTE [Dead writes].
  bool runs = true;
  // Its part of the plan to compute the tensors together, if it runs: NOTE [The plan of a replay]. Its place in
  // execution order, how it runs, the places of the operators that run on each stretch of its fill, the origins and
  // sizes of the memory of its outputs, and the numbers of the values that are not needed afterwards.
  std::optional<std::size_t> place;
  Way way = Way::kNotAtAll;
  std::vector<std::size_t> steps;
  std::vector<Origin> origins;
  std::vector<std::size_t> nbytes;
  std::vector<std::int64_t> drops;
  // The elements that it computes, such as `[96:128], [200:232]`: NOTE [Demand by parts]. Empty for all of them.
  std::string parts;
};

// The value that a tensor shows, and text that includes its geometry if that differs: `%1 as float32[2] at 2`.
struct ExplainedTensor {
  std::int64_t value = 0;
  std::string text;
};

struct Explanation {
  // In recording order.
  std::vector<ExplainedOperation> operations;
  // One for each tensor.
  std::vector<ExplainedTensor> tensors;
  // From the plan, in bytes: the peak of memory, including the tensors, and the bytes written.
  std::size_t peak = 0;
  std::size_t written = 0;
};

// Returns the recorded operators that make `tensors`. Raises ValueError for a tensor without a recording. With
// `CacheUse::kReads`, returns what would run now, given the values that reads have cached.
TORCHEXT_API Explanation explain(at::ArrayRef<at::Tensor> tensors, CacheUse cache = CacheUse::kNone);

}  // namespace torchext
