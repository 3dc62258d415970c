#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/macros/Macros.h>

namespace torchext {

// NOTE [Resizing to the same size]
//
// Code that writes its results to a given tensor first calls `resize_()`, which mostly changes nothing. On a real
// tensor that costs three lookups in the dispatch table. To cost about the same on a fake one, the keys `Fake` and
// `DeferredInit` each have a kernel for `resize_` that checks the size first (`unboxed.cpp`, `deferred_resize.cpp`),
// and pass on all other calls.

// Returns true if `op` is `resize_` and would not change its fake argument.
bool isResizeToSameSize(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// The same for a call of `resize_` with these arguments.
bool isResizeToSameSize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format);

// Passes the call to `handler`, boxed.
using ResizeHandler = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);
void callResizeHandler(ResizeHandler handler,
                       c10::DispatchKeySet keys,
                       const at::Tensor& self,
                       c10::SymIntArrayRef size,
                       std::optional<c10::MemoryFormat> format);

// While an instance exists, the fakes among the outputs of a call appear to have no memory (`isTensorSubclassLike()`),
// so that `at::native::resize_output()` calls the operator `resize_`. Otherwise it would allocate memory directly for a
// tensor on the CPU, which fails after the tensor has got its new sizes.
class ResizableOutputs {
 public:
  ResizableOutputs(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  C10_DISABLE_COPY_AND_ASSIGN(ResizableOutputs);
  ~ResizableOutputs();

  // Returns true for operators whose outputs an instance finds: each `out`, and the tensor that `resize_as_` resizes.
  static bool existFor(const c10::OperatorHandle& op);

  // Returns true for the outputs of an instance.
  static bool isOne(const at::Tensor& tensor);

 private:
  void add(const at::Tensor& output);

  std::vector<at::Tensor> outputs_;
};

}  // namespace torchext
