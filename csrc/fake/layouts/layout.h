#pragma once

// NOTE [Layouts]
//
// A fake is a strided tensor on a storage without memory. What else there is in PyTorch is a layout: of some there are
// fakes, made up of strided ones (sparse); others are refused (nested, quantized, of MKL-DNN). All that a layout needs
// of the handler of fakes is behind one interface. Each layout is a file in `kinds/`, which `kinds/kinds` registers.
//
// A call is offered to the layouts twice: each may refuse it before anything else is decided; and the first one that it
// concerns runs it, unless it is composite.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

class LayoutHandler {
 public:
  LayoutHandler() = default;
  LayoutHandler(const LayoutHandler&) = delete;
  LayoutHandler& operator=(const LayoutHandler&) = delete;
  LayoutHandler(LayoutHandler&&) = delete;
  LayoutHandler& operator=(LayoutHandler&&) = delete;
  virtual ~LayoutHandler() = default;

  // Of tensors. The last three are asked only about tensors that the layout has.

  // True for a tensor of this layout, fake or real. False for those that are strided tensors on a storage, and for
  // those of which there are no fakes.
  virtual bool has(const at::TensorBase& tensor) const noexcept;

  // Raises NotImplementedError when `tensor` cannot be copied as a fake because of its layout.
  virtual void checkCanBeFaked(const at::Tensor& tensor) const;

  virtual bool isFake(const at::TensorBase& tensor) const;

  // The strided tensors that make up `tensor`.
  virtual std::vector<at::Tensor> membersOf(const at::Tensor& tensor) const;

  // A fake like `tensor`, but made up of the fakes `members`, of which there are as many. It has their dtype and
  // device, and shares their storages. Asks neither the dispatcher nor a mode.
  virtual at::Tensor fakeOf(const at::Tensor& tensor, at::ArrayRef<at::Tensor> members) const;

  // Of calls about fakes, with the arguments on top of a stack.

  // Raises UnsupportedOperatorError when the call takes or makes a tensor of this layout, and there are no fakes of it.
  virtual void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // True when the call takes or makes a tensor of this layout.
  virtual bool concerns(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) const;

  // Raises what is known to be wrong with a call that concerns the layout, before any kernel is run.
  virtual void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

  // Replaces the arguments of a call that has been checked by its results.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;
};

// To be called before there are fakes. Layouts are asked in the order of registration.
void registerLayout(std::unique_ptr<const LayoutHandler> layout);

// The layout that has `tensor`, or null.
const LayoutHandler* layoutOf(const at::TensorBase& tensor) noexcept;

// The layout that the call concerns, or null.
const LayoutHandler* layoutOfCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Asks all layouts: see the functions of these names.
void checkLayoutCanBeFaked(const at::Tensor& tensor);
void refuseLayouts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Lives while a layout runs a kernel of PyTorch's on this thread. Such a kernel hands on the errors of the operators
// that it calls, which must keep their types until then. Nests.
class InLayoutKernel {
 public:
  InLayoutKernel() noexcept;
  InLayoutKernel(const InLayoutKernel&) = delete;
  InLayoutKernel& operator=(const InLayoutKernel&) = delete;
  InLayoutKernel(InLayoutKernel&&) = delete;
  InLayoutKernel& operator=(InLayoutKernel&&) = delete;
  ~InLayoutKernel();
};

bool isInLayoutKernel() noexcept;

}  // namespace torchext
