#pragma once

// Metadata of operators that PyTorch has kernels of for CUDA only, and no Meta kernel that works: the statistics that
// processes exchange in `torch.nn.SyncBatchNorm` (Normalization.cu), the fused cells of `torch.nn.GRU` and `LSTM`
// (RNN.cu), cuDNN's `grid_sample()`, and whether cuDNN or MIOpen computes `ctc_loss`. The kernel of the CPU cannot be
// asked: it does not exist, or returns no tensor.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

bool hasOwnKernel(const c10::OperatorHandle& op);

// Replaces the arguments on top of `stack`, which are on the meta device, by what a call of `op` returns.
void callOwnKernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace torchext
