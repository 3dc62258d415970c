#include "deferred_resize.h"

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/resize_ops.h>
#include <torch/library.h>

#include "../../core/deferred_init/record/recorder.h"
#include "resize.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter): so do all in-place operators

const at::Tensor& resizeDeferred(DispatchKeySet keys,
                                 const at::Tensor& self,
                                 c10::SymIntArrayRef size,
                                 std::optional<c10::MemoryFormat> format) {
  if (isResizeToSameSize(self, size, format)) {
    const DispatchKeySet below{DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit};
    return at::_ops::resize_::redispatch(keys & below, self, size, format);
  }
  callResizeHandler(&deferredInitFallback, keys, self, size, format);
  return self;
}

// NOLINTEND(bugprone-return-const-ref-from-parameter)

}  // namespace

void registerResizeOfDeferred() {
  // Leaked: kernels may be in flight until the process ends.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::DeferredInit, __FILE__, __LINE__);
  library->impl("resize_", &resizeDeferred);
}

}  // namespace torchext
