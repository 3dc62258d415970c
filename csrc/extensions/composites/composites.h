#pragma once

// Kernels on the key of composites: NOTE [Composites that read memory].

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace torchext {

// Registers the kernels of value_readers.cpp, for operators of `aten`.
void registerValueReaders(torch::Library& library);

// Calls the kernel so that its factories make fakes, even outside of fake_mode(), or deferred tensors, if an argument
// is one, and so that it may resize outputs that are fake.
void callWithFactoriesOfCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Makes the allocations of a composite operator fake, even outside of fake_mode(), or deferred. If the kernel accesses
// memory, they are real: `at::tensor()` writes numbers into the result of a factory (`tensor_cpu()`, Utils.cpp), and
// `ctc_loss` divides by such a tensor of target lengths.
void allocatingKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

bool isUndeferredFake(const at::Tensor& tensor);

// Replaces the arguments of a call by its only result.
void replaceArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::IValue result);

}  // namespace torchext
