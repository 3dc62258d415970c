#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// NOTE [Composed on CUDA]
//
// Some differentiable operators have one kernel for all devices (`CompositeExplicitAutograd`), which calls other
// operators: `aten::_trilinear` multiplies slice by slice. These operators allocate temporary buffers. A rule for the
// whole operator (NOTE [Allocations of kernels]) could only repeat their allocations. So on fake CUDA devices this
// kernel runs on the fakes, and the operators that it calls are faked. Elsewhere, the operator's own Meta kernel
// determines the results directly. The recorder of deferred_init needs the whole operator.

// Returns the key of the kernel that a call of `op` runs on the fakes, if it is such an operator and is called on CUDA.
std::optional<c10::DispatchKey> composedKernelOnCuda(const c10::OperatorHandle& op,
                                                     c10::ArrayRef<c10::IValue> arguments);

}  // namespace torchext
