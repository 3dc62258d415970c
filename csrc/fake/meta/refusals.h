#pragma once

// NOTE [Refusing what real tensors refuse]
//
// A Meta kernel checks less than the kernel that it stands for, and its messages differ. The best authority on what
// real tensors refuse is their own kernel, which checks before it computes. So a call that has not been made before is
// tried out on stand-ins: small real tensors of the same shapes, strides and dtypes (stand_ins.h). What the kernel
// raises, the fake call raises.
//
//   * Values do not exist, so only an error that does not depend on them counts: one that is the same for all fills, or
//     that is about dtypes.
//   * A call that is too large is tried out with smaller sizes: NOTE [Smaller calls]. An error counts if the same call
//     passes with common dtypes: then it is about dtypes, for which sizes do not matter. Otherwise the call is tried
//     out as it is, if its arguments are affordable, up to where its kernel allocates a large result.
//   * If the Meta kernel has raised, the call is most probably wrong, and may be larger: its kernel will not compute.
//   * Only PyTorch's own CPU kernels are run, none that would draw from a generator of the user's, and none that trusts
//     an argument: NOTE [What kernels trust].
//
// Calls that have passed or were refused are remembered, and not tried out again.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "real_results.h"

namespace torchext {

// Raises what a call of `op` on real tensors like `arguments` would raise, if that is known not to depend on values.
// `results` are those of the Meta kernel, and then those of `WrittenTensors::changed()`. Returns the same of the trial,
// if there was one.
RealResults refuseAsReal(const c10::OperatorHandle& op,
                         c10::ArrayRef<c10::IValue> arguments,
                         c10::ArrayRef<c10::IValue> results);

// The same for a call that cannot be faked, and whose error may be one that real tensors raise, or whose results need a
// trial of its own size. The trial may take long.
RealResults refuseAsReal(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// The same for a call that is most probably right, but needs values that fakes do not have.
void refuseAsRealIfCheap(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torchext
