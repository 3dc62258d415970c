#pragma once

// NOTE [What Meta kernels do not tell of results]
//
// The results of real kernels differ from those of their Meta kernels where nobody looks but who counts memory, or asks
// for a device:
//
//   * some losses compute an element for each input in their result, and shrink that when they have reduced it, so that
//     its storage stays large: the structured kernels of `mse_loss` and `smooth_l1_loss` have the broadcast size,
//     `binary_cross_entropy` and `soft_margin_loss` resize what they return (Loss.cpp, Loss.cu);
//   * the fast path of `torch.nn.MultiheadAttention` returns undefined weights unless they are wanted;
//   * memory-efficient attention with dropout, before 2.14 also without, returns the state of the generator on the CPU,
//     unless a CUDA graph is captured (`_efficient_attention_forward()` in attention.cu);
//   * oneDNN's LSTM has a workspace for its backward, of a size that only oneDNN knows, in grad mode, and none without
//     (`mkldnn_rnn_layer()` in RNN.cpp). Its Meta kernel returns an empty one. Reading that from memory would be
//     out of bounds, so a deferred LSTM whose workspace cannot be found out on zeros is run at once.

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Gives the fakes in `results`, which a call with these arguments has made, what the kernel of their device gives them.
void completeResults(const c10::OperatorHandle& op,
                     c10::ArrayRef<c10::IValue> arguments,
                     std::vector<c10::IValue>& results);

}  // namespace torchext
