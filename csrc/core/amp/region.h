#pragma once

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <torchext/autocast.h>
#include <torchext/macros.h>

#include "../../libraries/support/leases.h"
#include "../../libraries/support/open_blocks.h"

namespace torchext {

// NOTE [Autocast regions]
//
// A region sets the same thread state as `torch.autocast`: whether the `Autocast*` key of a device type is enabled, the
// dtype that its kernels cast to, whether they cache the casts of weights, and the nesting depth of regions. PyTorch's
// kernels do the rest, and both kinds of regions nest in each other.
//
// The open regions of a thread are kept by owner: NOTE [Guards and blocks]. If a region is left before one that was
// entered after it, the later one takes over the state to restore.

// `canAutocast()` must hold for the device type.
TORCHEXT_API void enterRegion(BlockOwner owner, const RegionOptions& options);

// Leaves the last region that `owner` entered on this thread. Raises if no such region is open.
TORCHEXT_API void leaveRegion(BlockOwner owner);

// Returns the accelerator of this thread, which is the fake one in `fake_mode(gpu=...)`, or the CPU.
TORCHEXT_API c10::DeviceType deviceTypeInUse();

// Returns true if a self-cleaning region is open on this thread. Another region inside it may decide.
TORCHEXT_API bool isInSelfCleaningRegion() noexcept;

// NOTE [Compiled code in regions]
//
// Code compiled by AOTAutograd contains the casts of its region, and runs without autocast in any region. Self-cleaning
// regions must treat it as if it ran with the settings around it. So this guard is active around it, before autocast is
// disabled. It nests: one part of the code may run inside another. Python code also ends the guard, so it holds the
// lease of the functions that are replaced for that: the last marked tensor may be destroyed in the code.
class TORCHEXT_API CompiledCodeGuard {
 public:
  CompiledCodeGuard();
  C10_DISABLE_COPY_AND_ASSIGN(CompiledCodeGuard);
  ~CompiledCodeGuard();

 private:
  LeaseHold lease_{leaseOfMarks()};
  std::optional<c10::DispatchKeySet> previous_;
};

// Returns true if operators autocast around the compiled code that runs on this thread. False outside of compiled code.
bool isAutocastingAroundCompiledCode(c10::DeviceType device_type);

// Returns the number of open regions of this thread, of torchext and `torch.autocast`, for any device type, enabled or
// not.
int regionDepth() noexcept;

// Returns true if a torchext region of this thread makes operators autocast now.
TORCHEXT_API bool isInEnabledRegion() noexcept;

}  // namespace torchext
