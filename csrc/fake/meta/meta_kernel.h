#pragma once

// Which kernel tells the metadata of a call's results.
//
// For many operators PyTorch registers Python functions as Meta kernels (`activate_meta()`,
// torch/_meta_registrations.py), over or in the place of what runs eagerly. Where those find another dtype, other
// strides, or other errors, than the C++ that runs eagerly, that C++ is run on the meta device instead.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Calls it with the arguments on top of `stack`, which are on the meta device.
void callMetadataKernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
