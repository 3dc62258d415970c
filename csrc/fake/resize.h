#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/SymIntArrayRef.h>

namespace torchext {

// NOTE [Resizing to the same size]
//
// Code that writes its results into a given tensor calls `resize_()` before, each time and mostly for nothing. On a
// real tensor that costs three lookups in the dispatch table. So that a fake one costs about the same, the two handlers
// each have a kernel for `resize_` which looks at the size first, and does the usual with all other calls.

// Registers the kernel of the `Fake` key. To be called once per process, with its fallback. Where the key is shared,
// calls of `resize_` take the usual way.
void registerResizeOfFakes();

// True when `op` is `resize_`, and leaves its fake argument as it is.
bool isResizeToSameSize(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// The same for a call of `resize_` with these arguments.
bool isResizeToSameSize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format);

// Does the usual: hands the call to `handler`, boxed.
using ResizeHandler = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);
void callResizeHandler(ResizeHandler handler,
                       c10::DispatchKeySet keys,
                       const at::Tensor& self,
                       c10::SymIntArrayRef size,
                       std::optional<c10::MemoryFormat> format);

}  // namespace torchext
