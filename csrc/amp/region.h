#pragma once

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <torchext/autocast.h>
#include <torchext/macros.h>

#include "../support/leases.h"
#include "../support/open_blocks.h"

namespace torchext {

// NOTE [Autocast regions]
//
// A region sets the thread's state that `torch.autocast` sets: whether the `Autocast*` key of a device type is met, to
// which dtype its kernels cast, whether they remember the casts of weights, and how deep regions are nested. PyTorch's
// kernels do the rest, and each of the two kinds of regions sees the other.
//
// What is open on a thread is kept by owner: NOTE [Guards and blocks]. Where a region is left before one that was
// entered after it, the later one takes over what is to be restored.

// The device type must be one that autocasts: canAutocast().
TORCHEXT_API void enterRegion(BlockOwner owner, const RegionOptions& options);

// Leaves the last region that `owner` has entered on this thread. Raises when there is none.
TORCHEXT_API void leaveRegion(BlockOwner owner);

// The accelerator that is in use on this thread, the fake one in `fake_mode(fake_cuda=...)`, or the CPU.
TORCHEXT_API c10::DeviceType deviceTypeInUse();

// Is a self-cleaning region open on this thread? Whether it decides is another question: others may be open inside.
TORCHEXT_API bool isInSelfCleaningRegion() noexcept;

// NOTE [Compiled code in regions]
//
// What AOTAutograd has compiled has the casts of its region in it, and runs without autocast, whatever regions are
// open. To self-cleaning regions it is to look as if it ran with what is in force around it. So this guard lives around
// it, before autocast is switched off. Nests: one part of it may run inside of another. Python is to end it as well, so
// it holds the lease of what is replaced there: the last marked tensor may die in the code.
class TORCHEXT_API CompiledCodeGuard {
 public:
  CompiledCodeGuard();
  C10_DISABLE_COPY_AND_ASSIGN(CompiledCodeGuard);
  ~CompiledCodeGuard();

 private:
  LeaseHold lease_{leaseOfMarks()};
  std::optional<c10::DispatchKeySet> previous_;
};

// Do operators autocast around the compiled code that runs on this thread? False where none runs.
bool isAutocastingAroundCompiledCode(c10::DeviceType device_type);

// How many regions are open on this thread, ours and `torch.autocast`'s, for any device type, enabled or not.
int regionDepth() noexcept;

// Is one of ours open on this thread that makes operators autocast now?
TORCHEXT_API bool isInEnabledRegion() noexcept;

}  // namespace torchext
