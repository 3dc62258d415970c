// Distances between all pairs of rows: DistanceKernel.cu and its callers.

#include <cstdint>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

void distances(KernelCall& call) {
  const BlockNumber first = call.copyUnlessContiguous(call.tensor(0));
  const BlockNumber second = call.copyUnlessContiguous(call.tensor(1));
  call.allocateResults();
  call.free({second, first});
}

// Holds the gradient of each pair and feature before the sum.
void distancesBackward(KernelCall& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& first = call.tensor(1);
  const BlockNumber copy = call.copyUnlessContiguous(first);
  const BlockNumber other = call.copyUnlessContiguous(call.tensor(2));
  call.allocateResult(0);
  call.allocateAndFree(gradient.numel() * first.size(-1) * toSigned(first.element_size()));
  call.free({other, copy});
}

void ownDistancesBackward(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(1);
  if (self.numel() > 0 && self.size(0) > 1) {
    call.allocateAndFree((self.size(0) - 1) * KernelCall::bytesOf(call.result()));
  }
}

const KernelRules kDistanceRules{
    {distances, {"aten::_cdist_forward"}},
    {distancesBackward, {"aten::_cdist_backward"}},
    {ownDistancesBackward, {"aten::_pdist_backward"}},
};

}  // namespace

}  // namespace torchext
