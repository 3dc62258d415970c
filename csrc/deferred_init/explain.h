#pragma once

// Recorded operators for people to read.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

#include "plan/replay_plan.h"

namespace torchext {

// A value that an operator has left in a storage, as a tensor that shows all of it that is known to be used.
struct ExplainedValue {
  // The values of an explanation are counted from 0, in the order in which they come about.
  std::int64_t number = 0;
  std::vector<std::int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

struct ExplainedOperation {
  // As in `aten::uniform_`; or `constant`, of values that nobody computed, such as those of `torch.tensor()`.
  std::string name;
  // The call with its arguments, without what it writes: `aten::uniform_(%0, -0.5, 0.5)`.
  std::string call;
  // The numbers of the values that it reads, in the order of its arguments.
  std::vector<std::int64_t> reads;
  std::vector<ExplainedValue> writes;
  // Where on the tape of its generator it starts, and how many draws it takes, if that was known without running it:
  // `TapePosition::draws()` and `length()`.
  std::optional<std::uint64_t> generator_offset;
  std::optional<std::uint64_t> draws;
  // The source line that recorded it, or empty when nobody traced.
  std::string source;
  // False if nobody reads what it writes: NOTE [Dead writes].
  bool runs = true;
  // What the plan of computing the tensors together says of it, if it runs: NOTE [The plan of a replay]. Its place in
  // the order in which they run, as what it is run, the places of the operators that are run on each stretch of what it
  // fills, where the memory of what it writes comes from and how much that is, and the numbers of the values that are
  // not needed afterwards.
  std::optional<std::size_t> place;
  Way way = Way::kNotAtAll;
  std::vector<std::size_t> steps;
  std::vector<Origin> origins;
  std::vector<std::size_t> nbytes;
  std::vector<std::int64_t> drops;
  // Which elements it computes, such as `[96:128], [200:232]`: NOTE [Demand by parts]. Empty if that is all of them.
  std::string parts;
};

// What a tensor shows: a value, and in words how, if not as it was written: `%1 as float32[2] at 2`.
struct ExplainedTensor {
  std::int64_t value = 0;
  std::string text;
};

struct Explanation {
  // In the order of their recording.
  std::vector<ExplainedOperation> operations;
  // One for each tensor.
  std::vector<ExplainedTensor> tensors;
  // Of the plan, in bytes: the most memory at one time, with the tensors, and what is written.
  std::size_t peak = 0;
  std::size_t written = 0;
};

// Returns the recorded operators that make `tensors`. Raises ValueError for one of which nothing is recorded.
// With `Memory::kUses`, what would run now: values that a read has computed before may still be remembered.
TORCHEXT_API Explanation explain(at::ArrayRef<at::Tensor> tensors, Memory memory = Memory::kNone);

}  // namespace torchext
