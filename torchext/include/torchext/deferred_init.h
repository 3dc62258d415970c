#pragma once

/// @file
/// Deferred initialization: construct now, compute the values later, with the same bits.

#include <memory>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// While at least one lives on a thread, tensors that are constructed on that thread are fake, and their construction
/// is recorded. Guards nest. Each must end on the thread that it began on, and the last one first.
class TORCHEXT_API DeferredInitGuard {
 public:
  /// @throws c10::Error Another library owns the dispatch key `DeferredInit`, or `Fake` in a way in which it cannot be
  ///     shared, or this build does not fit the PyTorch of the process.
  DeferredInitGuard();
  C10_DISABLE_COPY_AND_ASSIGN(DeferredInitGuard);
  ~DeferredInitGuard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns true while `tensor` is fake and its construction was recorded. What is done to such a tensor is recorded,
/// too, also after the guard has ended.
TORCHEXT_API bool isDeferred(const at::TensorBase& tensor);

/// Makes `tensors` real, in place: every holder of them sees their values, and so does every other tensor that shows
/// the same storages. Real tensors are left alone. What several of the tensors depend on is computed once for each
/// call, so give together what belongs together. On an error all tensors are as they were.
///
/// Any number of threads may call this and evaluate() at once, with the same tensors, too: they wait for each other.
/// Everything else that uses tensors which become real, or others that show the same storages, must happen before or
/// after: calls of operators on them, isDeferred(), making or changing views of them. Dispatch reads the keys of a
/// tensor without a lock, and this takes some of them away. What other threads may do meanwhile is to read their sizes
/// and strides, and to let go of them. Tensors on other storages are free to be used, also if they are recorded as
/// computed from these.
///
/// @throws c10::ValueError One of them is fake and its construction was not recorded.
/// @throws c10::Error A real tensor that a recorded operator reads has changed since, or an operator has failed.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> tensors);

/// Returns a real tensor with the value that `deferred` will have, and leaves `deferred` as it is.
///
/// @throws c10::ValueError `deferred` is not deferred, or no longer: another thread has made it real.
/// @throws c10::Error As materialize().
TORCHEXT_API at::Tensor evaluate(const at::Tensor& deferred);

}  // namespace torchext
