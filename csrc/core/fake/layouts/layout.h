#pragma once

// NOTE [Layouts]
//
// A fake is a strided tensor on a storage without memory. All other kinds of tensors in PyTorch are layouts here. Some
// layouts have fakes, which consist of strided fakes (sparse); others are refused (nested, quantized, MKL-DNN). Only
// tensors without a storage can be fakes of a layout: one with a storage is fake if its storage is (`isFake()`). One
// interface covers everything that the handler of fakes needs from a layout. Each layout is a file in
// `extensions/layouts`, whose `kinds.cpp` registers it.
//
// Calls on fakes are offered to the layouts twice. First, each layout may refuse the call; only `lift_fresh` and
// `pin_memory` have been handled before. Then, unless the operator is composite or a collective, the first layout
// concerned checks and runs the call. If its results do not depend on the layout, the layout runs the call on the Meta
// kernels. `Shadows` then replaces each argument with a layout by a contiguous meta tensor of the same sizes.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"

namespace torchext {

// Returns the layout of `tensor`, or null.
TORCHEXT_API const LayoutHandler* layoutOf(const at::TensorBase& tensor) noexcept;

// Returns the first layout that the call concerns, or null.
const LayoutHandler* layoutOfCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Call `checkCanBeFaked()` and `refuse()` of all layouts.
void checkLayoutCanBeFaked(const at::Tensor& tensor);
void refuseLayouts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Exists while a layout runs a PyTorch kernel on this thread. Errors of the operators that the kernel calls must keep
// their C++ types until the layout has caught them. Nests.
class InLayoutKernel {
 public:
  InLayoutKernel() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(InLayoutKernel);
  ~InLayoutKernel();
};

bool isInLayoutKernel() noexcept;

}  // namespace torchext
