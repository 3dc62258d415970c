#pragma once

// NOTE [Errors of real tensors]
//
// A Meta kernel checks less than the real kernel, and its messages differ. Real kernels check before they compute, so
// they are the best source of errors for real tensors. A call that has not been made before is therefore tried out on
// stand-ins: small real tensors of the same shapes, strides and dtypes (stand_ins.h). If the kernel raises an error,
// the fake call raises it.
//
//   * Values do not exist, so an error counts only if it does not depend on them: it is the same for all fills, or
//     concerns dtypes.
//   * A call that is too large is tried out with smaller sizes: NOTE [Smaller calls]. An error counts if the same call
//     passes with common dtypes: then it concerns dtypes, regardless of sizes. Otherwise the call is tried out at its
//     own sizes if its arguments are affordable, up to the point where its kernel allocates a large result.
//   * If the Meta kernel has raised an error, the call is most likely wrong. It may then be larger, because its kernel
//     will not compute.
//   * Only PyTorch's own CPU kernels are run, and none that would draw from a user's generator or that trusts an
//     argument: NOTE [Preconditions of kernels].
//
// Calls that have passed or were refused are remembered, and not tried out again.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "real_results.h"

namespace torchext {

// Raises the error of a call of `op` on real tensors like `arguments`, if the error does not depend on values. Returns
// the results of the trial, if there was one. Implements the hook of the same name.
RealResults tryOut(TrialReason reason,
                   const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> meta_results);

}  // namespace torchext
