#pragma once

// NOTE [Wrong results of Meta kernels]
//
// The results of real kernels differ from those of their Meta kernels in ways that only affect memory counts and
// devices:
//
//   * Some losses compute an element for each input in their result and shrink it after the reduction, so its storage
//     stays large: the structured kernels of `mse_loss` and `smooth_l1_loss` have the broadcast size;
//     `binary_cross_entropy` and `soft_margin_loss` resize their result (Loss.cpp, Loss.cu).
//   * The fast path of `torch.nn.MultiheadAttention` returns undefined weights unless they are requested.
//   * Memory-efficient attention with dropout returns the state of the generator on the CPU unless a CUDA graph is
//     captured (`_efficient_attention_forward()` in attention.cu). Before 2.14, it does so without dropout as well.
//   * oneDNN's LSTM has a workspace for its backward operator, in grad mode only. Only oneDNN can compute its size
//     (`mkldnn_rnn_layer()` in RNN.cpp). The Meta kernel returns an empty one, and real kernels would read beyond it.
//     So a deferred LSTM is run at once if its workspace size cannot be determined with zeros.

#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Gives the fakes in `results`, which a call with these arguments has made, the properties that the device's kernel
// gives them.
void completeResults(const c10::OperatorHandle& op,
                     c10::ArrayRef<c10::IValue> arguments,
                     std::vector<c10::IValue>& results);

}  // namespace torchext
