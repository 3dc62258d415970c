#pragma once

// Some of the values of a random fill, with the bits that they have in the whole, in a time that depends on how many
// they are: what lies before them and in between is skipped on the tape of the generator.

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

#include "random_fill.h"
#include "truncated_fill.h"

namespace torchext {

// The values of a fill from `begin` to before `end`, and the memory for them.
struct FillRun {
  std::int64_t begin;
  std::int64_t end;
  void* values;
};

// Returns true if the values of a fill of `count` values by an engine in the state `engine` can be computed so.
TORCHEXT_API bool canFillParts(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);
bool canFillParts(const TruncatedFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

// Computes `runs`, of which none overlap and which are in order, of a fill of `count` values that begins with `engine`
// and that can be computed so, on several threads.
TORCHEXT_API void fillParts(const RandomFill& fill,
                            std::int64_t count,
                            c10::ArrayRef<FillRun> runs,
                            const at::mt19937_data_pod& engine);
void fillParts(const TruncatedFill& fill,
               std::int64_t count,
               c10::ArrayRef<FillRun> runs,
               const at::mt19937_data_pod& engine);

}  // namespace torchext
