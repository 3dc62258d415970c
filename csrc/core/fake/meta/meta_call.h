#pragma once

#include <exception>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include "meta_kernel.h"

namespace torchext {

// The decisions about a call on the Meta kernels.
struct MetaPlan {
  // The reason why the call cannot run, or null. If it is set, the other fields are meaningless.
  std::exception_ptr refusal;
  // The device of the outputs.
  c10::Device device{c10::kCPU};
  MetadataKernel kernel = MetadataKernel::kMeta;
};

// Returns the plan for a call of `op` with the arguments on top of `stack`. At least one of them must be fake, unless
// `op` is a factory. Raises nothing and runs nothing. The refusal is a DataDependentError, an UnsupportedOperatorError,
// or the c10::Error of a call that would write to a real tensor or to overlapping memory, or that mixes devices.
MetaPlan planOnMeta(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the fake results of the call, computed by the operator's Meta kernel. Changes the metadata of arguments as
// the operator does, but not the stack.
//
// Raises the plan's refusal or the error of real tensors for the same call, and passes on the kernel's errors. Before
// raising the error of real tensors, it sets `refusal`: the same call will always raise it.
torch::jit::Stack runOnMeta(const c10::OperatorHandle& op,
                            const torch::jit::Stack& stack,
                            const MetaPlan& plan,
                            std::exception_ptr& refusal);

// Plans the call, and replaces the arguments on top of `stack` by its results.
void runOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Raises c10::Error if the call of `op` with the arguments on top of `stack` would write to a real tensor.
void refuseToWriteIntoRealTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
