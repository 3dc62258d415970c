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
// Code that writes its results to a given tensor first calls `resize_()`, which mostly changes nothing. On a real
// tensor that costs three lookups in the dispatch table. To cost about the same on a fake one, the keys `Fake` and
// `DeferredInit` each have a kernel for `resize_` that checks the size first (`unboxed.cpp`, `resize.cpp`), and pass on
// all other calls.

// Handles such calls (CallHandler), and registers the kernel of the key `DeferredInit` when that is taken. Call while
// the library is loaded.
void registerResize();

// Returns true if `op` is `resize_` and would not change its fake argument.
bool isResizeToSameSize(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// The same for a call of `resize_` with these arguments.
bool isResizeToSameSize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format);

}  // namespace torchext
