#pragma once

// NOTE [AmpTensors in a backward pass]
//
// The operators of a backward pass run in the dtypes that those of the forward pass ran in, so that there identity
// neither casts nor cleans. Two things that run in it are none of its formulas: what torch.utils.checkpoint computes
// again, which is a forward pass, and what a user has written, which takes what the program holds in whatever dtype
// that is. PyTorch tells neither apart from a formula, so Python does, by the guards below.

#include "../macros.h"

namespace torchext {

// Lives around a backward pass.
class TORCHEXT_API BackwardGuard {
 public:
  BackwardGuard() noexcept;
  BackwardGuard(const BackwardGuard&) = delete;
  BackwardGuard& operator=(const BackwardGuard&) = delete;
  BackwardGuard(BackwardGuard&&) = delete;
  BackwardGuard& operator=(BackwardGuard&&) = delete;
  ~BackwardGuard();
};

// Lives around what is computed again, inside of the regions that repeat the state of the forward pass.
class TORCHEXT_API RecomputationGuard {
 public:
  // `has_region_decided`: what isRegionDeciding() was in the forward pass.
  explicit RecomputationGuard(bool has_region_decided) noexcept;
  RecomputationGuard(const RecomputationGuard&) = delete;
  RecomputationGuard& operator=(const RecomputationGuard&) = delete;
  RecomputationGuard(RecomputationGuard&&) = delete;
  RecomputationGuard& operator=(RecomputationGuard&&) = delete;
  ~RecomputationGuard();
};

// Is this thread in a backward pass, and not in what is computed again?
bool isInBackward() noexcept;

// Is the function of the backward pass that runs now a user's, and none of PyTorch's own formulas? To be asked in a
// backward pass. Hooks count to the function that they come before or after.
bool isInUsersBackward();

// Is a region open on this thread, ours or `torch.autocast`'s, enabled or not, that decides in the place of identity?
// Those around a running backward pass do not.
TORCHEXT_API bool isRegionDeciding() noexcept;

}  // namespace torchext
