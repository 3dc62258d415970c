#pragma once

// Functions that implement `KernelTrials` (core/hooks/hooks.h), besides those of refusals.cpp.

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/DimVector.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

void correctByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);
void correctStridesByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);
c10::DimVector stridesLike(const at::Tensor& real, const at::Tensor& meta);

// Returns true if no correction is needed for `meta_results`: those of `tryOut()`.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, Arguments meta_results);

bool mayRunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
std::shared_ptr<ResultRecipe> describeOnZeros(const c10::OperatorHandle& op,
                                              const torch::jit::Stack& stack,
                                              c10::Device device);

}  // namespace torchext
