// Connects the extensions with the hooks of the core when the library is loaded.

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "../core/fake/meta/meta_call.h"
#include "../core/hooks/hooks.h"
#include "amp/amp_handler.h"
#include "collectives/collectives.h"
#include "composites/composites.h"
#include "composites/gradient_factories.h"
#include "composites/versions.h"
#include "cuda/fake_cuda.h"
#include "dispatch/deferred_resize.h"
#include "dispatch/foreign_fakes.h"
#include "dispatch/hit_checks.h"
#include "dispatch/resize.h"
#include "dispatch/unboxed.h"
#include "kernels/device_kernels.h"
#include "layouts/kinds.h"
#include "marks/marks_handlers.h"
#include "marks/origins.h"
#include "memory/memory_counter.h"
#include "parts/parts_hook.h"
#include "placement/placed.h"
#include "replay/computed_values.h"
#include "replay/external_values.h"
#include "replay/replay_memory.h"
#include "support/allocation_limit.h"
#include "tapes/philox_tape.h"
#include "tapes/replay_fill.h"
#include "tapes/twister_tape.h"
#include "trials/trial_hooks.h"
#include "values/fake_values.h"
#include "values/value_shortcuts.h"

namespace torchext {

namespace {

void testAllocations(bool (*is_broken)(std::string_view what) noexcept) {
  TORCH_CHECK(
      testAllocationLimit(is_broken("allocation_limit")),
      "torchext needs a CPU allocator of PyTorch that reports memory before it has an owner, but that of torch ",
      TORCH_VERSION, " does not. Use a release that this torchext supports, or a newer torchext.");
}

[[maybe_unused]] const bool are_connected = [] {
  Hooks& all = hooks();
  registerLayouts();
  registerCollectives();
  registerFakeValues();
  registerResize();
  registerHitChecks();
  registerKernelTrials();
  registerDeviceKernels();
  registerFakeCuda();
  setFakeCudaAllocation(&runOnMeta);
  registerKeyOwners();
  all.followers.add(&UncountedVersions::follow);
  all.on_composites_key.add(&registerValueShortcuts);
  all.on_composites_key.add(&registerComposites);
  all.on_lazy_bits.add(&prepareOperatorsForLazyBits);
  all.on_fake_key.add(&registerUnboxedCalls);
  all.on_fake_key.add([] { makeGradientsFake(true); });
  all.on_deferred_init_key.add(&registerResizeOfDeferred);
  setTape(c10::kCPU, twisterTape());
  setTape(c10::kCUDA, philoxTape());
  all.replay_fill = [](const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Generator& generator) {
    return replayFill(op, stack, generator);
  };
  registerPartRules();
  registerComputedValues();
  registerExternalValues();
  registerReplayMemory();
  registerPlacements();
  registerMarks();
  registerOrigins();
  registerAmpHandler();
  registerMemoryCounter();
  all.self_tests.add(&testAllocations);
  return true;
}();

}  // namespace

}  // namespace torchext
