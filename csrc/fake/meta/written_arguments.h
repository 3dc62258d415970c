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
// their stand-ins. Without a trial, the Meta kernel decides, but only an `out`, and the argument of an operator with
// the tag `inplace_view`, may change its shape.

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include "real_results.h"

namespace torchext {

// The tensors that a call writes according to the operator's schema, in order, as they were before the call.
class WrittenTensors {
 public:
  WrittenTensors(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  // Returns each written tensor if its sizes, strides or storage size have changed, and None in its place otherwise.
  torch::jit::Stack changed() const;

 private:
  struct Entry {
    at::Tensor tensor;
    c10::DimVector sizes;
    c10::DimVector strides;
    std::size_t nbytes;
  };
  std::vector<Entry> entries_;
};

// Gives `fake`, an argument that a call of `op` writes, its metadata after the call. `shadow` is its meta tensor, which
// has been written. `real` is the entry of `WrittenTensors::changed()` for the stand-in of a trial, or null if there
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
