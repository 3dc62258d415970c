#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

// Returns the results of a call whose shapes depend only on the values of one argument: the mask of `masked_select`,
// the lengths of a packed sequence, or the positions of `bincount`. The other data need no values. Returns nothing for
// other calls, or if `value_of` does not have the values. Calls operators on fakes.
std::optional<torch::jit::Stack> resultsBySizes(const c10::OperatorHandle& op,
                                                c10::ArrayRef<c10::IValue> arguments,
                                                TensorMapper value_of);

}  // namespace torchext
