#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/macros/Macros.h>

namespace torchext {

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
