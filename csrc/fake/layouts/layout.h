#pragma once

// NOTE [Layouts]
//
// A fake is a strided tensor on a storage without memory. Every other kind of tensor in PyTorch is a layout here. Some
// layouts have fakes, which are made up of strided ones (sparse); others are refused (nested, quantized, MKL-DNN). Only
// tensors without a storage can be fakes of a layout: one with a storage is fake if its storage is (`isFake()`).
// Everything about a layout that the handler of fakes has to know is behind one interface. Each layout is a file in
// `kinds/`, and `kinds/kinds` registers it.
//
// A call about fakes is offered to the layouts twice. First each may refuse it; only `lift_fresh` and `pin_memory` have
// been handled before. Then, unless the operator is composite or a collective, the first layout that it concerns checks
// and runs it. Where the layout itself has the call run on the Meta kernels, because its results do not depend on it,
// `Shadows` puts a contiguous meta tensor of the same sizes in the place of each argument of a layout.

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

  // About tensors. The last three are called only for tensors that the layout has.

  // Returns true for a tensor of this layout, fake or real. Always false if such tensors are strided tensors on a
  // storage, or if there are no fakes of them.
  virtual bool has(const at::TensorBase& tensor) const noexcept;

  // Raises NotImplementedError if `tensor` cannot be copied as a fake because of its layout.
  virtual void checkCanBeFaked(const at::Tensor& tensor) const;

  virtual bool isFake(const at::TensorBase& tensor) const;

  // Returns the strided tensors that make up `tensor`.
  virtual std::vector<at::Tensor> membersOf(const at::Tensor& tensor) const;

  // Returns a fake like `tensor`, but made up of `members`: as many fakes as `tensor` has members. It has the dtype and
  // device of its values, carries the `Fake` key, and shares the storages of the members. Calls neither the dispatcher
  // nor a mode.
  virtual at::Tensor fakeOf(const at::Tensor& tensor, at::ArrayRef<at::Tensor> members) const;

  // About calls with fakes, whose arguments are on top of a stack.

  // Raises UnsupportedOperatorError if the call takes or makes a tensor of this layout, and the layout has no fakes.
  virtual void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // Returns true if the call takes or makes a tensor of this layout.
  virtual bool concerns(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) const;

  // Raises what is known to be wrong with a call that concerns the layout, before any kernel is run.
  //
  // Must raise c10::NotImplementedError while isRecording() (recording.h) if an argument or a result has no storage.
  // The recorder of deferred_init notes the values of storages, so such a result would be a fake that nothing can
  // materialize; where it catches this error, it runs the call for real instead.
  virtual void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // Replaces the arguments of a call that has been checked by its results. Each result that is a fake must carry the
  // `Fake` key, which kernels of PyTorch's do not give to what they make of fake members: calls with it would not come
  // to our handler.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;
};

// To be called before there are fakes. Layouts are asked in the order of registration.
void registerLayout(std::unique_ptr<const LayoutHandler> layout);

// Returns the layout that has `tensor`, or null.
TORCHEXT_API const LayoutHandler* layoutOf(const at::TensorBase& tensor) noexcept;

// Returns the first layout that the call concerns, or null.
const LayoutHandler* layoutOfCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Call `checkCanBeFaked()` and `refuse()` of all layouts.
void checkLayoutCanBeFaked(const at::Tensor& tensor);
void refuseLayouts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Lives while a layout runs a kernel of PyTorch's on this thread. Errors of the operators that the kernel calls must
// keep their C++ types until the layout has caught them. Nests.
class InLayoutKernel {
 public:
  InLayoutKernel() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(InLayoutKernel);
  ~InLayoutKernel();
};

bool isInLayoutKernel() noexcept;

}  // namespace torchext
