#pragma once

// NOTE [Arguments that change their shape]
//
// Meta kernels do not always resize the arguments that a call writes as real kernels do:
//
//   * Those that are Python functions resize an `out` contiguously, where a TensorIterator gives it the order of
//     strides of its input, and where LAPACK needs columns.
//   * Those of in-place operators are made of functions with an `out`, and resize their argument: `a &= b` grows `a`.
//   * Some kernels resize arguments that their Meta kernels leave alone: `_fused_moving_avg_obs_fq_helper` gives its
//     scales one element for each channel.
//   * Some kernels resize an argument twice, which leaves a larger storage (`mse_loss` with an `out`).
//
// So the trial of the call decides, if there was one (NOTE [Refusing what real tensors refuse]): what happened to the
// stand-ins happens to the fakes. Where there was none, the Meta kernel decides, but only an `out`, and the argument of
// an operator with the tag `inplace_view`, may get another shape.

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include "real_results.h"

namespace torchext {

// The tensors that a call of an operator writes according to its schema, in order, as they were before the call.
class WrittenTensors {
 public:
  WrittenTensors(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  // Returns, for each of them, the tensor if its sizes, strides or storage size are others now, and None if not.
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

// Gives `fake`, an argument that a call of `op` writes, the metadata that it has after the call. `shadow` is the meta
// tensor that stood for it, and has been written. `real` is the entry of `WrittenTensors::changed()` for the stand-in
// of a trial, which had the sizes of the call if `has_sizes` is true, or null if there was no trial.
//
// Raises c10::Error if an in-place operator would change the shape, and UnsupportedOperatorError if it is known that
// the kernel changes it, but not to which. `fake` has not changed then.
void resizeWritten(const c10::OperatorHandle& op,
                   const at::Tensor& fake,
                   const at::Tensor& shadow,
                   const c10::IValue* real,
                   bool has_sizes);

}  // namespace torchext
