#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "amp_arguments.h"

namespace torchext {

// Marks the results of a call as wrapped, to be cleaned, or neither, by its arguments. Arguments keep their marks, also
// written ones, unless a collective or FSDP moved wrapped tensors into them.
void markResults(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

// The same for a call that neither autocasts AmpTensors nor cleans: results in a self-cleaning region are marked to be
// cleaned.
void markResultsOfOthers(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

}  // namespace torchext
