// Connects the extensions with the hooks of the core when the library is loaded.

#include <c10/util/Exception.h>

#include "../core/hooks/hooks.h"
#include "../libraries/support/large_memory.h"
#include "amp/amp_tensor.h"
#include "collectives/collectives.h"
#include "cuda/fake_cuda.h"
#include "cuda/virtual_table.h"
#include "dispatch/foreign_fakes.h"
#include "dispatch/hit_checks.h"
#include "kernels/device_kernels.h"
#include "marks/origins.h"
#include "marks/tensor_marks.h"
#include "memory/memory_counter.h"
#include "placement/placed.h"
#include "support/allocation_limit.h"
#include "support/registrations.h"
#include "tapes/twister_tape.h"

namespace torchext {

namespace {

constexpr TestedPiece kAllocationLimit{"allocation_limit", "the CPU allocator reporting memory before it has an owner",
                                       215, &testAllocationLimit};
constexpr TestedPiece kBackendMeta{"backend_meta", "copies of a tensor keeping its BackendMeta", 215, &testBackendMeta,
                                   /*is_needed_by_all=*/false};
constexpr TestedPiece kFallbacks{"fallbacks", "private members of the Dispatcher about the fallbacks of keys", 215,
                                 &testFallbacks, /*is_needed_by_all=*/false};
constexpr TestedPiece kVirtualTable{"virtual_table", "virtual functions being called as the Itanium C++ ABI specifies",
                                    215, &testVirtualTable};

[[maybe_unused]] const bool are_connected = [] {
  Hooks& all = hooks();
  registerCollectives();
  registerFakeValues();
  registerUnboxedCalls();
  registerLayouts();
  registerHitChecks();
  registerKernelTrials();
  registerDeviceKernels();
  registerFakeCuda();
  all.decompositions.add(&kernelForSeveralDevices);  // last: the others take precedence
  registerKeyOwners();
  registerComposites();
  registerTwisterTape();
  registerPhiloxTape();
  registerReplayFill();
  registerPartRules();
  registerKeptValues();
  all.make_memory = &makeLargeStorage;
  registerPlacements();
  registerOrigins();
  registerAmpHandler();
  registerMemoryCounter();
  all.pieces.add(&kAllocationLimit);
  all.pieces.add(&kBackendMeta);
  all.pieces.add(&kFallbacks);
  all.pieces.add(&kVirtualTable);
  return true;
}();

}  // namespace

}  // namespace torchext
