#pragma once

// Computes some values of a random fill, bitwise equal to those of the whole fill, in time proportional to their
// number. The generator skips the values before and between them.

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

#include "../support/fresh_pages.h"
#include "random_fill.h"
#include "truncated_fill.h"

namespace torchext {

// The values [begin, end) of a fill, and the memory for them.
struct FillRun {
  std::int64_t begin;
  std::int64_t end;
  void* values;
};

// Returns true if parts of a fill of `count` values by an engine in the state `engine` can be computed.
TORCHEXT_API bool canFillParts(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);
bool canFillParts(const TruncatedFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

// Computes `runs` of a fill of `count` values that begins with `engine`, on several threads. The runs must be sorted
// and must not overlap, and their memory must be consecutive. Requires `canFillParts()`.
TORCHEXT_API void fillParts(const RandomFill& fill,
                            std::int64_t count,
                            c10::ArrayRef<FillRun> runs,
                            const at::mt19937_data_pod& engine);
void fillParts(const TruncatedFill& fill,
               std::int64_t count,
               c10::ArrayRef<FillRun> runs,
               const at::mt19937_data_pod& engine);

// Returns the pages of the memory of `runs` from `begin` on.
FreshPages pagesOf(c10::ArrayRef<FillRun> runs, void* begin, std::int64_t element_bytes);

}  // namespace torchext
