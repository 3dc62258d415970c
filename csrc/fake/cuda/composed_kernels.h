#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// NOTE [Composed on CUDA]
//
// Some operators that autograd knows have one kernel for all devices (`CompositeExplicitAutograd`), which computes by
// calling other operators: `aten::_trilinear` multiplies slice by slice. What it allocates on the way is theirs, and a
// rule of what kernels allocate (NOTE [What kernels allocate]) could only repeat it. So on fake CUDA devices this
// kernel is run on the fakes, and the operators that it calls are faked. Elsewhere, the Meta kernel tells the results
// of the operator at once.

// Returns the key of the kernel that a call of `op` runs on the fakes, if it is such an operator and is called on CUDA.
std::optional<c10::DispatchKey> composedKernelOnCuda(const c10::OperatorHandle& op,
                                                     c10::ArrayRef<c10::IValue> arguments);

}  // namespace torchext
