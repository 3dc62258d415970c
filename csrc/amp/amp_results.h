#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "amp_arguments.h"

namespace torchext {

// Marks what a call has returned by what its arguments were: wrapped, to be cleaned, or neither. Arguments stay what
// they were, also those that it has written, unless a collective or FSDP has moved wrapped tensors into them.
void markResults(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

// The same for a call that neither autocasts AmpTensors nor cleans: what a self-cleaning region makes is to be
// cleaned.
void markResultsOfOthers(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

}  // namespace torchext
