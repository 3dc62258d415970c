#pragma once

// Deferred initialization: construct now, compute the values later, with the same bits. The public C++ API.

#include <ATen/core/Tensor.h>

#include "../support/included_key.h"
#include "../support/macros.h"

namespace torchext {

// While at least one lives on a thread, tensors constructed on it are fake and their construction is recorded. Nests.
class TORCHEXT_API DeferredInitGuard {
 public:
  DeferredInitGuard();
  DeferredInitGuard(const DeferredInitGuard&) = delete;
  DeferredInitGuard& operator=(const DeferredInitGuard&) = delete;
  DeferredInitGuard(DeferredInitGuard&&) = delete;
  DeferredInitGuard& operator=(DeferredInitGuard&&) = delete;
  ~DeferredInitGuard();

 private:
  IncludedKey include_;
};

// For languages without guards: NOTE [Guards and blocks]. Leaving raises where no block is open on this thread.
TORCHEXT_API void enterDeferredInit();
TORCHEXT_API void leaveDeferredInit();

// True while `tensor` is fake and its construction was recorded. What is done to such a tensor is recorded too, inside
// and outside of deferred_init.
TORCHEXT_API bool isDeferred(const at::TensorBase& tensor);

// Makes `tensors` real, in place: NOTE [Becoming real]. Every tensor that shows the same storages becomes real with
// them. Real tensors are left alone; a fake that was never recorded is an error. On an error all tensors are as they
// were.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> tensors);

// Returns a real tensor with the value that `deferred` will have, and leaves `deferred` as it is.
TORCHEXT_API at::Tensor evaluate(const at::Tensor& deferred);

}  // namespace torchext
