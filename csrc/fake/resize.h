#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// NOTE [Resizing to the same size]
//
// Code that writes its results into a given tensor calls `resize_()` before, each time and mostly for nothing. On a
// real tensor that costs three lookups in the dispatch table. So that a fake one costs about the same, the two handlers
// have a kernel for `resize_` which looks at the size first, and does the usual with all other calls.

// To be called once per process.
void registerResize();

// True when `op` is `resize_`, and leaves its fake argument as it is.
bool isResizeToSameSize(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace torchext
