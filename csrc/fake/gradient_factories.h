#pragma once

#include <torchext/macros.h>

namespace torchext {

// Makes what the gradient formulas of PyTorch allocate fake, or deferred, where a gradient that they are given is so:
// `sgn` returns `at::zeros()`, `matrix_exp` writes its gradient into a tensor from `at::empty()`. Formulas are called
// by the engine, on any thread and in no operator, but PyTorch shows observers each node with its inputs
// (`RecordScope::BACKWARD_FUNCTION`).
//
// The backward of a function that a user has written is left alone, as its forward is: its factories make real tensors
// outside of a block.

// Begins or stops to observe. Nodes of real gradients cost more meanwhile, so it is stopped while no fake is alive.
TORCHEXT_API void makeGradientsFake(bool is_wanted);

}  // namespace torchext
