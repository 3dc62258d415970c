#include "../../core/hooks/hooks.h"
#include "../support/registrations.h"
#include "memory_overlap.h"
#include "real_results.h"
#include "refusals.h"
#include "zeros_call.h"

namespace torchext {

void registerKernelTrials() {
  KernelTrials& trials = hooks().trials;
  trials.tryOut = &tryOut;
  trials.refuseOverlap = &checkMemoryOverlap;
  trials.correct = &correctByReal;
  trials.correctStrides = &correctStridesByReal;
  trials.stridesLike = &stridesLike;
  trials.mayRunOnZeros = &mayRunOnZeros;
  trials.describeOnZeros = &describeOnZeros;
}

}  // namespace torchext
