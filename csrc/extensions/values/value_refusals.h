#pragma once

// NOTE [Errors about known values]
//
// Real kernels check values: positions, lengths, pivots, divisors, probabilities. The trials of NOTE [Errors of real
// tensors] have no values, and their outcomes are remembered for all values. So a call that reads known integers is
// tried out with these values as well, once for each set of values:
//
//   * The error is raised if the same call passes with other values, and if it occurs with all fills of unknown
//   tensors.
//   * Random operators check floating-point values too, so those count for them.
//   * A trial ends without a decision when its kernel allocates a large result. Calls that write a large tensor, and
//     kernels that trust their integers, are not tried out.
//   * CUDA kernels do not raise such errors. Their assertions end the program later.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

// Returns true for a tensor of integers, whose values kernels may check, except a number that PyTorch has wrapped.
bool mayBeChecked(const at::Tensor& tensor) noexcept;

// Raises the error of real tensors that results from known values. `value_of` returns the value of a tensor, or an
// undefined tensor. The call must have been accepted with unknown values.
void refuseKnownValues(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       const TensorMapper& value_of);

}  // namespace torchext
