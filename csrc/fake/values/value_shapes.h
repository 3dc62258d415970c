#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../support/stack_utils.h"

namespace torchext {

// Returns the results of a call whose shapes depend on the values of one argument only, the mask of `masked_select` or
// the lengths of a packed sequence, if `value_of` has them: data whose values do not exist are selected from. Returns
// nothing for other calls. Calls operators on fakes.
std::optional<torch::jit::Stack> resultsBySizes(const c10::OperatorHandle& op,
                                                c10::ArrayRef<c10::IValue> arguments,
                                                TensorMapper value_of);

}  // namespace torchext
