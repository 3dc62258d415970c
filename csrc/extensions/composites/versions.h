#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// Bumps the version of each of `written`, unless the key `ADInplaceOrView` is excluded: its kernels exclude it and bump
// versions themselves, and Python's factories exclude it. As with real tensors, raises an error for an inference tensor
// outside of inference mode.
void countVersions(at::TensorList written);

// The same for the result of a factory that fills it by an operator, if it is a strided fake.
void countFill(const at::Tensor& result);

// NOTE [Versions that PyTorch does not count]
//
// Most operators that write have a kernel on `ADInplaceOrView`, which bumps the versions of their arguments. Some have
// none: foreach operators, outputs in lists, `out` overloads of a few composite operators, and factories that C++
// calls. There, the operators that the real kernel calls bump the versions: `copy_()` for each output, in a few kernels
// `resize_()` for those that change their size, and `fill_()` for a new tensor. Fakes do not run these kernels.
class UncountedVersions final : public CallFollower {
 public:
  // Returns true for such an operator, and for some that PyTorch counts.
  static bool concerns(const c10::OperatorHandle& op);

  static std::unique_ptr<CallFollower> follow(const c10::OperatorHandle& op,
                                              const torch::jit::Stack& stack,
                                              c10::function_ref<bool()> decomposes);

  // Finds the fakes that such an operator writes, before the call.
  UncountedVersions(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  // Bumps their versions after the call, and that of the result on `stack` if `op` is such a factory.
  void finish(const torch::jit::Stack& stack) override;

  // Makes their values unknown after an error: the real kernel writes the tensors before the one that it refuses.
  void fail() noexcept override;

 private:
  std::vector<at::Tensor> written_;
  bool fills_result_ = false;
  std::vector<c10::DimVector> sizes_;  // if changes of sizes are counted
};

}  // namespace torchext
