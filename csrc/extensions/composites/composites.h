#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"

namespace torchext {

// Registers the kernels of NOTE [Composites that read memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

// Prepares operators for fakes with lazy bits, which are rare. Call it before a fake gets one.
//
//   * NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results with a factory
//     (`mul_zerotensor()` in BinaryOps.cpp). This makes these results fake, also outside of fake_mode(). Elementwise
//     calls on fakes then take a few tenths of a microsecond longer.
//   * Most operators do not handle the negative and the conjugate bit. For them, PyTorch's fallback
//     (MathBitsFallback.h) passes a clone of an `out` with such a bit, and then resizes the `out` without the
//     dispatcher. This makes such outputs resizable, for all operators of `aten`: it registers 900 kernels.
void prepareOperatorsForLazyBits(c10::DispatchKeySet bits);

// Kernels of the key of composites: NOTE [Composites that read memory].

// Register the kernels of the files with these names, for operators of `aten`. Call the last one after all others: it
// registers `allocatingKernel` for all composites that may allocate and have no other kernel.
void registerValueReaders(torch::Library& library);
void registerSpecialValues(torch::Library& library);
void registerSparseConstructors(torch::Library& library);
void registerAllocations(torch::Library& library);

// Calls the kernel so that its factories make fakes, even outside of fake_mode(), or deferred tensors, if an argument
// is one, and so that it may resize outputs that are fake.
void callWithFactoriesOfCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Makes the allocations of a composite operator fake, even outside of fake_mode(), or deferred. If the kernel accesses
// memory, they are real: `at::tensor()` writes numbers into the result of a factory (`tensor_cpu()`, Utils.cpp), and
// `ctc_loss` divides by such a tensor of target lengths.
void allocatingKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Replaces the argument called `name`, whose memory the operator reads, by its values if it is a fake with dimensions.
// Raises an error if these are unknown. An argument without dimensions is read through an operator. Returns the
// argument on the stack.
c10::IValue& readValues(const c10::OperatorHandle& op, torch::jit::Stack& stack, const char* name);

bool isUndeferredFake(const at::Tensor& tensor);

// Replaces the arguments of a call by its only result.
void replaceArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool answer);

// Runs `kKernel` and translates its C++ errors into Python errors.
template <void (*kKernel)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*)>
void translated(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  try {
    kKernel(op, keys, stack);
  } catch (const DataDependentError& error) {
    translateError(ErrorKind::kDataDependent, error);
    throw;
  }
}

}  // namespace torchext
