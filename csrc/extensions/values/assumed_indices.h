#pragma once

// NOTE [Assumed indices]
//
// Sorting, selecting and sampling return positions in a dimension of n elements. The policy for routing chooses them:
// torchext/fake/routing.py. A row of at most n positions has no duplicates. Values that depend on positions, such as
// the tokens of each expert, are computed exactly even if they are large, up to kMaxRoutedBytes. Beyond that the
// positions are a pattern that repeats.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "assumptions.h"

namespace torchext {

// Assumes the positions that `op` returns. Returns false for other calls.
bool assumeIndices(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   const Assumptions& assumptions);

}  // namespace torchext
