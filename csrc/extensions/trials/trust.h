#pragma once

// NOTE [Preconditions of kernels]
//
// A kernel checks the arguments of users, but not always the results of earlier calls: a backward kernel trusts the
// results of its forward kernel, and a library trusts its own buffers. Meta kernels may make such tensors of any size,
// and a trial would access memory beyond them. So a table lists the operators whose kernels trust an argument, and the
// kind of trust. All others are tried out.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "../../libraries/support/operator_table.h"

namespace torchext {

enum class Trust : std::uint8_t {
  kNothing,
  kBuffers,     // the sizes or contents of buffers: never tried out
  kSizes,       // sums or products of sizes: tried out only at their own sizes, if these are modest
  kIndices,     // positions: tried out with zeros, which are valid positions
  kStatistics,  // one per channel: tried out on the CPU if the numbers match
  kSegments,    // lengths: unknown ones are tried out unchecked, if there is a row of them for each row of the data
  kForward,     // CPU forward results, which differ on CUDA: tried out only on the CPU
};

// The arguments that the CPU kernel of an operator trusts.
extern const OperatorTable<Trust> trustOf;

// Returns true if a call with these arguments may be tried out, at its own sizes or at smaller ones.
bool mayBeTriedOut(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torchext
