#pragma once

// The sources of the metadata of a call's results.
//
// For many operators PyTorch registers Python functions as Meta kernels (`activate_meta()`,
// torch/_meta_registrations.py), even if C++ code for Meta exists. If their dtypes, strides or errors differ from those
// of the eager C++ code, that code is run on the meta device instead.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

enum class MetadataKernel : std::uint8_t {
  kMeta,
  kComposite,  // the kernel of `CompositeExplicitAutograd`
  kNone,       // no kernel: the result is like the first argument
  kOwn,        // a torchext function: own_kernels.h
  kZeros,      // there is no Meta kernel: NOTE [Running the CPU kernel]
  kMissing,    // there is neither a Meta kernel nor a usable CPU kernel: the call raises an error
};

// Returns the kernel for a call of `op` with the arguments on top of `stack`, on any device.
MetadataKernel metadataKernelFor(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls the kernel with the arguments on top of `stack`, which must be on the meta device. Without a kernel, calls
// PyTorch's fallback for the meta device, which raises the corresponding error.
void callMetadataKernel(MetadataKernel kernel, const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
