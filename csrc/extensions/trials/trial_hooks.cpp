#include "trial_hooks.h"

#include "../support/registrations.h"

namespace torchext {

void registerKernelTrials() {
  KernelTrials& trials = hooks().trials;
  trials.tryOut = &tryOut;
  trials.refuseOverlap = &refuseOverlap;
  trials.correct = &correctByReal;
  trials.correctStrides = &correctStridesByReal;
  trials.stridesLike = &stridesLike;
  trials.mayRunOnZeros = &mayRunOnZeros;
  trials.describeOnZeros = &describeOnZeros;
}

}  // namespace torchext
