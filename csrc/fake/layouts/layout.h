#pragma once

// NOTE [Layouts]
//
// A fake is a strided tensor on a storage without memory. All other kinds of tensors in PyTorch are layouts here. Some
// layouts have fakes, which consist of strided fakes (sparse); others are refused (nested, quantized, MKL-DNN). Only
// tensors without a storage can be fakes of a layout: one with a storage is fake if its storage is (`isFake()`). One
// interface covers everything that the handler of fakes needs from a layout. Each layout is a file in `kinds/`, and
// `kinds/kinds` registers it.
//
// Calls on fakes are offered to the layouts twice. First, each layout may refuse the call; only `lift_fresh` and
// `pin_memory` have been handled before. Then, unless the operator is composite or a collective, the first layout
// concerned checks and runs the call. If its results do not depend on the layout, the layout runs the call on the Meta
// kernels. `Shadows` then replaces each argument with a layout by a contiguous meta tensor of the same sizes.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

class LayoutHandler {
 public:
  LayoutHandler() = default;
  C10_DISABLE_COPY_AND_ASSIGN(LayoutHandler);
  virtual ~LayoutHandler() = default;

  // Functions on tensors. The last three are called only for tensors of this layout.

  // Returns true for a tensor of this layout, real or fake. Always returns false for layouts without fakes, and for
  // those whose tensors are strided tensors on a storage.
  virtual bool has(const at::TensorBase& tensor) const noexcept;

  // Raises NotImplementedError if `tensor` cannot be copied as a fake because of its layout.
  virtual void checkCanBeFaked(const at::Tensor& tensor) const;

  virtual bool isFake(const at::TensorBase& tensor) const;

  // Returns the strided members of `tensor`.
  virtual std::vector<at::Tensor> membersOf(const at::Tensor& tensor) const;

  // Returns a fake like `tensor` with the given members: as many fakes as `tensor` has members. It has the dtype and
  // device of its values, carries the `Fake` key, and shares the storages of the members. Calls neither the dispatcher
  // nor a mode.
  virtual at::Tensor fakeOf(const at::Tensor& tensor, at::ArrayRef<at::Tensor> members) const;

  // Functions on calls with fakes, whose arguments are on top of a stack.

  // Raises UnsupportedOperatorError if the call takes or makes a tensor of this layout, and the layout has no fakes.
  virtual void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // Returns true if the call takes or makes a tensor of this layout.
  virtual bool concerns(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) const;

  // Raises predictable errors of a call that concerns the layout, before any kernel runs.
  //
  // Must raise c10::NotImplementedError while isRecording() (recording.h) if an argument or a result has no storage.
  // The recorder of deferred_init records the values of storages, so it could not materialize such a result. It catches
  // this error and, where possible, runs the call for real.
  virtual void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // Replaces the arguments of a checked call by its results. Every fake result must carry the `Fake` key; otherwise
  // calls on it would not reach our handler. PyTorch's kernels do not add the key to tensors made from fake members.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;
};

// Call before there are fakes. Layouts are queried in the order of registration.
void registerLayout(std::unique_ptr<const LayoutHandler> layout);

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
