#pragma once

#include <exception>
#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include "../cache/result_recipe.h"
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

// Returns the recipe of the call for the distinct tensors among its arguments: NOTE [Sources of recipes],
// meta_call.cpp. Changes neither these nor the stack. If real tensors refuse the same call, the recipe raises their
// error. Raises the plan's refusal, and passes on the kernel's errors.
std::shared_ptr<ResultRecipe> describeOnMeta(const c10::OperatorHandle& op,
                                             const torch::jit::Stack& stack,
                                             CallTensors tensors,
                                             const MetaPlan& plan);

// Plans and describes the call, changes its arguments on top of `stack` as it does, and replaces them by its results.
void runOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Raises c10::Error if the call of `op` with the arguments on top of `stack` would write to a real tensor.
void refuseToWriteIntoRealTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torchext
