#pragma once

// Metadata of operators that have only CUDA kernels and no working Meta kernel: the statistics that processes exchange
// in `torch.nn.SyncBatchNorm` (Normalization.cu), the fused cells of `torch.nn.GRU` and `LSTM` (RNN.cu), cuDNN's
// `grid_sample()`, and the check whether cuDNN or MIOpen computes `ctc_loss`. CPU kernels cannot replace them: they do
// not exist, or return no tensor.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

bool hasOwnKernel(const c10::OperatorHandle& op);

// Replaces the arguments on top of `stack`, which must be on the meta device, by the results of a call of `op`.
void callOwnKernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
