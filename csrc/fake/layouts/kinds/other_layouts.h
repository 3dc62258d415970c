#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Raises UnsupportedOperatorError, which names the layout, when the call of `op` with the arguments on top of `stack`
// takes or makes a tensor of which there are no fakes: one that is nested, quantized, of MKL-DNN, or has no storage.
//
// PyTorch's own checks come too late for these: `NestedTensorImpl` has no sizes to ask for, and the Meta kernel of
// `quantize_per_tensor` returns floating-point numbers.
void refuseOtherLayouts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
