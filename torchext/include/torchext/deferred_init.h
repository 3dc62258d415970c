#pragma once

/// @file
/// Deferred initialization: construct now, compute bitwise equal values later.

#include <memory>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// While at least one guard lives on a thread, tensors constructed on that thread are fake, and their construction is
/// recorded. Guards nest. Each must end on the thread that it began on, in reverse order.
class TORCHEXT_API DeferredInitGuard {
 public:
  /// @throws c10::Error Another library owns the dispatch key `DeferredInit`, or owns `Fake` and cannot share it, or
  ///     this build does not match the PyTorch of the process.
  DeferredInitGuard();
  C10_DISABLE_COPY_AND_ASSIGN(DeferredInitGuard);
  ~DeferredInitGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns true while `tensor` is fake and its construction was recorded. Later operators on such a tensor are also
/// recorded, even after the guard has ended.
TORCHEXT_API bool isDeferred(const at::TensorBase& tensor);

/// Makes `tensors` real, in place: all references to them, and all other tensors on the same storages, get the values.
/// Real tensors stay unchanged. Values that several of the tensors depend on are computed once per call, so pass
/// related tensors together. On an error all tensors are unchanged.
///
/// Any number of threads may call this function and evaluate() at once, also with the same tensors: they wait for each
/// other. All other uses of tensors that become real, and of other tensors on the same storages, must happen before or
/// after: calls of operators, isDeferred(), making or changing views. Dispatch reads the keys of a tensor without a
/// lock, and this function removes some of them. During the call, other threads may read sizes and strides of these
/// tensors, and release them. Tensors on other storages may be used, even if they are recorded as computed from these.
///
/// @throws c10::ValueError One of them is fake and its construction was not recorded.
/// @throws c10::Error A real tensor that a recorded operator reads has changed since, or an operator has failed.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> tensors);

/// Returns a real tensor with the future values of `deferred`, which stays unchanged.
///
/// @throws c10::ValueError `deferred` is not deferred, or another thread has made it real.
/// @throws c10::Error The same errors as for materialize().
TORCHEXT_API at::Tensor evaluate(const at::Tensor& deferred);

}  // namespace torchext
