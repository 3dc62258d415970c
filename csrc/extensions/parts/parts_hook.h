#pragma once

// Functions that implement `PartRules` (core/hooks/hooks.h), besides those of part_rules.cpp.

#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include "../../core/deferred_init/plan/replay_plan.h"

namespace torchext {

std::vector<Demand> demandsByParts(const LiveGraph& graph);
void checkPlan(const ReplayPlan& plan);
void runForParts(const PlannedOperator& planned,
                 const PartsMemory& memory,
                 const at::Generator& generator,
                 PartRules::ReadTensor read);
void checkIsExact(const OpNode& node, const at::Tensor& result);
void planSteps(std::vector<PlannedOperator>& operators);
std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                       torch::jit::Stack& stack,
                                                       const at::Generator& generator,
                                                       c10::ArrayRef<const OpNode*> steps);

}  // namespace torchext
