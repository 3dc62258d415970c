#pragma once

// NOTE [Zeros of forward AD]
//
// If forward AD needs a tangent that an argument does not have, PyTorch makes zeros without memory
// (`_efficientzerotensor`), which are immutable and carry the `ZeroTensor` key. Products with them are such zeros
// again, regardless of the other factor, so that infinities and NaNs do not appear. PyTorch's kernels on that key are
// above ours and also handle fakes, if fakes carry the key like the tensors that they represent (`kLazyBits`). A few
// operators fall through the key, and their kernels check for it. The functions below handle these.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Returns the key of the kernel that a call with these arguments runs on the fakes, because it calls another operator
// that returns such zeros: `mul.Scalar` calls `mul.Tensor`. None for views, which Meta kernels make.
std::optional<c10::DispatchKey> kernelForZeroTensors(const c10::OperatorHandle& op,
                                                     c10::ArrayRef<c10::IValue> arguments);

// Replaces the meta result of a call whose kernel returns such zeros: `dot`.
void correctForZeroTensors(const c10::OperatorHandle& op,
                           c10::ArrayRef<c10::IValue> arguments,
                           torch::jit::Stack& results);

}  // namespace torchext
