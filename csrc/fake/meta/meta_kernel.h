#pragma once

// Where the metadata of a call's results come from.
//
// For many operators PyTorch registers Python functions as Meta kernels (`activate_meta()`,
// torch/_meta_registrations.py), even where C++ code for Meta exists. Where their dtypes, strides or errors differ from
// those of the C++ that runs eagerly, that C++ is run on the meta device instead.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

enum class MetadataKernel : std::uint8_t {
  kMeta,
  kComposite,  // the kernel of `CompositeExplicitAutograd`
  kNone,       // no kernel: the result is like the first argument
  kOwn,        // a function of ours: own_kernels.h
  kZeros,      // there is no Meta kernel: NOTE [Asking the kernel of the CPU]
  kMissing,    // there is no Meta kernel, and the CPU kernel cannot be asked: the call raises an error
};

// Returns the kernel for a call of `op` with the arguments on top of `stack`, on whatever device they are.
MetadataKernel metadataKernelFor(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls the kernel with the arguments on top of `stack`, which are on the meta device. If there is none, calls
// PyTorch's fallback for the meta device, which raises an error that says so.
void callMetadataKernel(MetadataKernel kernel, const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
