#pragma once

// The functions of this folder that implement `KernelTrials` (core/hooks/hooks.h).

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/DimVector.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

RealResults tryOut(TrialReason reason, const c10::OperatorHandle& op, Arguments arguments, Arguments meta_results);

void refuseOverlap(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

void correctByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);
void correctStridesByReal(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack);
c10::DimVector stridesLike(const at::Tensor& real, const at::Tensor& meta);

// Returns true if no correction is needed for `meta_results`, as in `tryOut()`.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, Arguments meta_results);

bool mayRunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
std::shared_ptr<ResultRecipe> describeOnZeros(const c10::OperatorHandle& op,
                                              const torch::jit::Stack& stack,
                                              c10::Device device);

}  // namespace torchext
