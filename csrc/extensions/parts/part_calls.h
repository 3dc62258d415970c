#pragma once

// Runs operators for parts: NOTE [Operators that compute parts].

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "../../core/deferred_init/plan/replay_plan.h"
#include "part_rules.h"

namespace torchext {

// `PartRules::run()`.
void runForParts(const PlannedOperator& planned,
                 const PartsMemory& memory,
                 const at::Generator& generator,
                 PartRules::ReadTensor read);

// `PartRules::checkIsExact()`.
void checkIsExact(const OpNode& node, const at::Tensor& result);

}  // namespace torchext
