#pragma once

// NOTE [Arguments that change shape]
//
// Meta kernels do not always resize written arguments as real kernels do:
//
//   * Python functions resize an `out` contiguously, whereas a TensorIterator gives it the order of its input's
//     strides, and LAPACK needs columns.
//   * Meta kernels of in-place operators are made of functions with an `out`, and resize their argument: `a &= b` grows
//     `a`.
//   * Some kernels resize arguments that their Meta kernels leave unchanged: `_fused_moving_avg_obs_fq_helper` gives
//     its scales one element for each channel.
//   * Some kernels resize an argument twice, which leaves a larger storage (`mse_loss` with an `out`).
//
// So the trial of the call decides, if there was one (NOTE [Errors of real tensors]): fakes change like
// their stand-ins. Without a trial, the Meta kernel decides, but of PyTorch's operators only an `out`, and the
// argument of an operator with the tag `inplace_view`, may change its shape.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

// Gives `fake`, an argument that a call of `op` writes, its metadata after the call. `shadow` is its meta tensor, which
// has been written. `real` is the entry of `RealResults` for it, or null if there
// was no trial. `has_sizes`: whether the trial had the sizes of the call.
//
// If an in-place operator would change the shape, raises c10::Error. If the kernel changes it to an unknown shape,
// raises UnsupportedOperatorError. In both cases `fake` is unchanged.
void resizeWritten(const c10::OperatorHandle& op,
                   const at::Tensor& fake,
                   const at::Tensor& shadow,
                   const c10::IValue* real,
                   bool has_sizes);

}  // namespace torchext
