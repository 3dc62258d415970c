#pragma once

#include <exception>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include "meta_kernel.h"

namespace torchext {

// How a call is run on the Meta kernels, decided before it is.
struct MetaPlan {
  // Why it cannot be, or null. Then the rest says nothing.
  std::exception_ptr refusal;
  // Where its outputs will be.
  c10::Device device{c10::kCPU};
  MetadataKernel kernel = MetadataKernel::kMeta;
};

// The plan for a call of `op` with the arguments on top of `stack`, at least one of which is fake unless it is a
// factory. Raises nothing, and runs nothing. The refusal is a DataDependentError, an UnsupportedOperatorError, or the
// c10::Error of a call that would write into a real tensor or into memory that overlaps, or mixes devices.
MetaPlan planOnMeta(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the fake results of the call, found out by running the operator's Meta kernel. Metadata of arguments that the
// operator changes is changed; the stack is not.
//
// Raises the plan's refusal, or what real tensors raise instead, and what the kernel raises.
torch::jit::Stack runOnMeta(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const MetaPlan& plan);

// Plans the call, and replaces the arguments on top of `stack` by its results.
void runOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Raises c10::Error when the call of `op` with the arguments on top of `stack` would write into a real tensor.
void refuseToWriteIntoRealTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
