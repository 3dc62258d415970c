#pragma once

// Predictions of the memory and time that a plan takes.

#include <cstddef>

#include <torchext/macros.h>

#include "../../core/deferred_init/plan/replay_plan.h"

namespace torchext {

// Returns the peak of memory in bytes, including the wanted values. Allocations inside kernels are estimated.
TORCHEXT_API std::size_t peakOf(const ReplayPlan& plan);

// Returns the peak of host memory only.
std::size_t peakOnCpuOf(const ReplayPlan& plan);

// Returns the bytes that all operators write, roughly proportional to the time.
TORCHEXT_API std::size_t bytesWrittenBy(const ReplayPlan& plan);

// Returns the computed share of the outputs of an operator, from 0 to 1.
TORCHEXT_API double shareOf(const PlannedOperator& planned);

}  // namespace torchext
