// Losses: a number for each element, and a reduction of these.

#include <optional>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

constexpr std::int64_t kNoReduction = 0;

// Reduces a contiguous tensor of these sizes to the result.
void reduceLosses(KernelCall& call, c10::IntArrayRef sizes) {
  const Tensor& result = call.result();
  const Tensor losses = at::detail::empty_meta(sizes, result.scalar_type());
  reduceOnGpu(call, {losses, result, std::nullopt, /*keepdim=*/false, accumulatorBytes(result.scalar_type())});
}

template <std::size_t Reduction>
void elementwiseLoss(KernelCall& call) {
  call.allocateResults();
  if (call.argument(Reduction).toInt() == kNoReduction) {
    return;
  }
  const auto sizes = at::infer_size_dimvector(call.tensor(0).sizes(), call.tensor(1).sizes());
  const auto element = toSigned(call.result().element_size());
  const BlockNumber losses = call.allocate(c10::multiply_integers(sizes) * element);
  reduceLosses(call, sizes);
  call.free(losses);
}

// `huber_loss()`: a separate function reduces the output of the kernel.
void huberLoss(KernelCall& call) {
  if (call.argument(2).toInt() == kNoReduction) {
    call.allocateResults();
    return;
  }
  const auto sizes = at::infer_size_dimvector(call.tensor(0).sizes(), call.tensor(1).sizes());
  const auto element = toSigned(call.result().element_size());
  const BlockNumber losses = call.allocate(c10::multiply_integers(sizes) * element);
  call.allocateResults();
  reduceLosses(call, sizes);
  call.free(losses);
}

// `binary_cross_entropy_cuda()`: the result first holds the losses, and is shrunk after their reduction.
template <std::size_t Reduction>
void lossInResult(KernelCall& call) {
  call.allocateResults();
  if (call.argument(Reduction).toInt() == kNoReduction) {
    return;
  }
  const BlockNumber reduced = call.copy(call.result());
  reduceLosses(call, call.tensor(0).sizes());
  call.free(reduced);
}

// `multi_margin_loss_cuda_out()`: one loss per sample.
void multiMarginLoss(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  constexpr std::size_t kReduction = 5;
  if (self.dim() == 2 && call.argument(kReduction).toInt() != kNoReduction) {
    const BlockNumber losses = call.allocate(self.size(0) * toSigned(self.element_size()));
    reduceLosses(call, self.sizes().slice(0, 1));
    call.free(losses);
  }
}

const KernelRules kLossRules{
    {elementwiseLoss<2>, {"aten::mse_loss", "aten::smooth_l1_loss"}},
    {huberLoss, {"aten::huber_loss"}},
    {multiMarginLoss, {"aten::multi_margin_loss"}},
    {lossInResult<2>, {"aten::soft_margin_loss"}},
    {lossInResult<3>, {"aten::binary_cross_entropy"}},
};

}  // namespace

}  // namespace torchext
