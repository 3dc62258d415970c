#pragma once

// NOTE [What kernels trust]
//
// A kernel checks what users pass to it, but not always what an earlier call has computed for it: a backward trusts its
// forward, and a library trusts its own buffers. Meta kernels make such tensors of any size, and a trial would read or
// write beyond them. So the operators whose kernels trust an argument are in a table, with what they trust. All others
// are tried out.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "../../support/operator_table.h"

namespace torchext {

enum class Trust : std::uint8_t {
  kNothing,
  kBuffers,     // the sizes or contents of buffers: never tried out
  kSizes,       // sums or products of sizes: tried out at their own sizes only, if these are modest
  kIndices,     // positions: tried out with zeros, where these are positions
  kStatistics,  // one of each channel: tried out on the CPU if there are as many
  kForward,     // what the forward on the CPU computes, which differs on CUDA: tried out on the CPU only
};

// What the CPU kernel of an operator trusts.
extern const OperatorTable<Trust> trustOf;

// Returns true if a call with these arguments may be tried out: at its own sizes, or at smaller ones.
bool mayBeTriedOut(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torchext
