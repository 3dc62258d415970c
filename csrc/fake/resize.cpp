#include "resize.h"

#include <optional>

#include <ATen/ops/resize_ops.h>
#include <torch/library.h>

#include "../deferred_init/recorder.h"
#include "fake.h"
#include "fake_handler.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::MemoryFormat;
using c10::OperatorHandle;
using c10::SymIntArrayRef;
using torch::jit::Stack;

namespace {

const OperatorHandle& resizeOperator() {
  static const OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::resize_", "");
  return op;
}

// As `resize_impl_cpu_()` decides. With a memory format the strides may change.
bool hasSize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return !format && self.has_storage() && isFake(self) && self.sym_sizes() == size;
}

// Before 2.13 modes and subclasses are below `Fake`, and have to see the call.
bool isLast(DispatchKeySet keys, DispatchKey key) {
  return !(keys & DispatchKeySet{DispatchKeySet::FULL_AFTER, key}).has(DispatchKey::Python);
}

using Handler = void (*)(const OperatorHandle&, DispatchKeySet, Stack*);

void callHandler(
    Handler handler, DispatchKeySet keys, const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  Stack stack;
  torch::jit::push(stack, self, size, format);
  handler(resizeOperator(), keys, &stack);
}

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter): so do all in-place operators

const Tensor& resizeFake(DispatchKeySet keys,
                         const Tensor& self,
                         SymIntArrayRef size,
                         std::optional<MemoryFormat> format) {
  if (!hasSize(self, size, format) || !isLast(keys, DispatchKey::Fake)) {
    callHandler(&fakeFallback, keys, self, size, format);
  }
  return self;
}

const Tensor& resizeDeferred(DispatchKeySet keys,
                             const Tensor& self,
                             SymIntArrayRef size,
                             std::optional<MemoryFormat> format) {
  if (hasSize(self, size, format)) {
    const DispatchKeySet below{DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit};
    return at::_ops::resize_::redispatch(keys & below, self, size, format);
  }
  callHandler(&deferredInitFallback, keys, self, size, format);
  return self;
}

// NOLINTEND(bugprone-return-const-ref-from-parameter)

template <typename Kernel>
void registerKernel(DispatchKey key, Kernel kernel) {
  // Leaked: kernels may be in flight until the process ends.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("resize_", kernel);
}

}  // namespace

void registerResize() {
  registerKernel(DispatchKey::Fake, &resizeFake);
  registerKernel(DispatchKey::DeferredInit, &resizeDeferred);
}

bool isResizeToSameSize(const OperatorHandle& op, const Stack& arguments) {
  if (op != resizeOperator()) {
    return false;
  }
  const auto size = torch::jit::peek(arguments, 1, 3).toSymIntVector();
  return hasSize(torch::jit::peek(arguments, 0, 3).toTensor(), size,
                 torch::jit::peek(arguments, 2, 3).toOptional<MemoryFormat>());
}

}  // namespace torchext
