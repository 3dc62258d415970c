#pragma once

#include "../../core/deferred_init/plan/replay_plan.h"

namespace torchext {

// Raises an internal error for an inconsistent plan: reads beyond a storage, before a write or after a drop; parts that
// are read but not computed; memory that two values claim; a value that is dropped twice, or never. With the
// environment variable TORCHEXT_CHECK_PLANS=1, which our tests set, each new plan is checked.
void checkPlan(const ReplayPlan& plan);

}  // namespace torchext
