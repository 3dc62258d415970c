#pragma once

// NOTE [Origins of inference tensors]
//
// Errors about inference tensors are raised far from the line that created the tensors. While a thread traces, each
// inference tensor that an operator returns is marked with the source line of the call: NOTE [Marked tensors] in
// tensor_marks.h. The mark is destroyed with the tensor, and there are at most as many marks as lines.
//
// A thread that traces demands the key of marked tensors, so the handler receives all operators. Operators on marked
// tensors also reach it after tracing, on any thread: it adds the origins as a note to errors about inference tensors.
//
// Blocks and guards of torchext restore whether the thread traced. PyTorch's modes restore the keys of the thread only,
// so a demand made in one of them is dropped by the first handled operator outside of all modes.

#include <string>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "../../core/inference/inference_mode.h"
#include "tensor_marks.h"

namespace torchext {

// Returns the source line that created `tensor`, as the interpreter reported it (libraries/support/interpreter.h).
// Empty if it was not traced.
TORCHEXT_API std::string originOf(const at::TensorBase& tensor);

// Calls `enterModeBlock()`. In the block, the thread traces if `is_traced`, or if all blocks are traced.
TORCHEXT_API void enterTracedBlock(BlockOwner owner, ModeBlock kind, bool is_traced);

// Makes this thread trace until the innermost guard of its dispatch keys is left.
TORCHEXT_API void traceOriginsHere();

// Sets whether each `enterTracedBlock()` on any thread traces.
TORCHEXT_API void traceOriginsInBlocks(bool enabled);

// Handles a call on a thread that traces, or with arguments that have an origin.
void handleOrigins(MarkedCall& call);

// Answers the hooks of `GuardAdditions` about origins. Call while the library is loaded.
void registerOrigins();

}  // namespace torchext
