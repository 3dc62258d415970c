#include "resize.h"

#include <ATen/ops/resize_ops.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../core/deferred_init/record/recorder.h"
#include "../../core/hooks/hooks.h"

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

// A `resize_` to the same size.
class NothingToResize final : public CallHandler {
 public:
  constexpr NothingToResize() = default;

  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& /*facts*/) const override {
    if (!isResizeToSameSize(op, stack)) {
      return std::nullopt;
    }
    return HandledCall{nullptr, HandledCall::Effect::kComputes, "the argument has this size already"};
  }

  void run(const OperatorHandle& op, DispatchKeySet /*below*/, Stack& stack) const override {
    torch::jit::drop(stack, op.schema().arguments().size() - 1);
  }
};

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter): so do all in-place operators

const Tensor& resizeDeferred(DispatchKeySet keys,
                             const Tensor& self,
                             SymIntArrayRef size,
                             std::optional<MemoryFormat> format) {
  if (isResizeToSameSize(self, size, format)) {
    const DispatchKeySet below{DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit};
    return at::_ops::resize_::redispatch(keys & below, self, size, format);
  }
  static const auto fallback = c10::KernelFunction::makeFromBoxedFunction<&deferredInitFallback>();
  return fallback.call<const Tensor&, const Tensor&, SymIntArrayRef, std::optional<MemoryFormat>>(
      resizeOperator(), keys, self, size, format);
}

// NOLINTEND(bugprone-return-const-ref-from-parameter)

}  // namespace

void registerResize() {
  static constexpr NothingToResize nothing;
  hooks().handlers.add(&nothing);
  hooks().on_deferred_init_key = [] {
    // Leaked: kernels may be in flight until the process ends.
    auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::DeferredInit, __FILE__, __LINE__);
    library->impl("resize_", &resizeDeferred);
  };
}

// Decides as `resize_impl_cpu_()` does. With a memory format the strides may change.
bool isResizeToSameSize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return !format && self.has_storage() && isFake(self) && self.sym_sizes() == size;
}

bool isResizeToSameSize(const OperatorHandle& op, const Stack& arguments) {
  if (op != resizeOperator()) {
    return false;
  }
  const auto size = torch::jit::peek(arguments, 1, 3).toSymIntVector();
  return isResizeToSameSize(torch::jit::peek(arguments, 0, 3).toTensor(), size,
                            torch::jit::peek(arguments, 2, 3).toOptional<MemoryFormat>());
}

}  // namespace torchext
