#pragma once

// NOTE [Origins of inference tensors]
//
// Errors about inference tensors are raised far from where the tensors were made. While a thread traces, each inference
// tensor that an operator returns is marked with the line of the program that called the operator: NOTE [Marked
// tensors] in tensor_marks.h. The mark dies with the tensor, and there are no more marks than lines.
//
// A thread that traces demands the key of marked tensors, so that all operators are met. Those on marked tensors are
// met when nobody traces any more, too, on any thread: an error about inference tensors gets a note of where they come
// from.
//
// Blocks of ours, and guards, put back what they have found: whether the thread traced. PyTorch's modes put back the
// thread's keys and know of nothing else, so that what was demanded in one of them is forgotten by the first operator
// that is met outside of all modes.

#include <string>

#include <ATen/core/Tensor.h>

#include <torchext/macros.h>

namespace torchext {

// Where `tensor` was made, as the interpreter told it (marks/source_lines.h). Empty when nobody traced then.
TORCHEXT_API std::string originOf(const at::TensorBase& tensor);

// Makes this thread trace until the innermost guard of its dispatch keys is left.
TORCHEXT_API void traceOriginsHere();

// Does this thread trace?
bool isTracingOrigins() noexcept;

// Whether each block of inference mode (mode_blocks.h) traces, on any thread, once it is entered.
TORCHEXT_API void traceOriginsInBlocks(bool enabled);
bool areBlocksTraced() noexcept;

}  // namespace torchext
