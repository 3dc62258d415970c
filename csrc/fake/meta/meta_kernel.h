#pragma once

// Which kernel tells the metadata of a call's results.
//
// For many operators PyTorch registers Python functions as Meta kernels (`activate_meta()`,
// torch/_meta_registrations.py), over or in the place of what runs eagerly. Where those find another dtype, other
// strides, or other errors, than the C++ that runs eagerly, that C++ is run on the meta device instead.

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

enum class MetadataKernel : std::uint8_t {
  kMeta,
  kComposite,  // that of `CompositeExplicitAutograd`
  kNone,       // the result is like the first argument
  kZeros,      // there is no Meta kernel: NOTE [Asking the kernel of the CPU]
  kMissing,    // there is none, and the kernel of the CPU cannot be asked: the call raises an error
};

// Decided by the arguments on top of `stack`, wherever they are.
MetadataKernel metadataKernelFor(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls it, or PyTorch's fallback for the meta device, which says that there is none, with the arguments on top of
// `stack`, which are on the meta device.
void callMetadataKernel(MetadataKernel kernel, const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
