#include "resize.h"

#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../support/stack_utils.h"
#include "../torch_internals/open_tensor_impl.h"
#include "calls/op_traits.h"
#include "storage/fake_tensor_impl.h"

namespace torchext {

using at::Tensor;
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

}  // namespace

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

void callResizeHandler(ResizeHandler handler,
                       DispatchKeySet keys,
                       const Tensor& self,
                       SymIntArrayRef size,
                       std::optional<MemoryFormat> format) {
  Stack stack;
  torch::jit::push(stack, self, size, format);
  handler(resizeOperator(), keys, &stack);
}

bool ResizableOutputs::existFor(const OperatorHandle& op) {
  return hasOut(op) || op.schema().name() == "aten::resize_as_";
}

ResizableOutputs::ResizableOutputs(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const bool is_resized = op.schema().name() == "aten::resize_as_";
  for (const auto i : c10::irange(arguments.size())) {
    if (arguments[i].is_out() || (is_resized && i == 0)) {
      forEachTensor(torch::jit::peek(stack, i, arguments.size()), [this](const Tensor& output) { add(output); });
    }
  }
}

ResizableOutputs::~ResizableOutputs() {
  for (const Tensor& output : outputs_) {
    DispatchKeySet& keys = OpenTensorImpl::keysOf(*output.unsafeGetTensorImpl());
    keys = keys.remove_backend(kWithoutValues);  // a difference of sets does not remove backends
  }
}

bool ResizableOutputs::isOne(const Tensor& tensor) {
  return !tensor.is_meta() && tensor.key_set().has_backend(kWithoutValues);
}

void ResizableOutputs::add(const Tensor& output) {
  if (isFake(output) && output.has_storage() && !output.key_set().has_backend(kWithoutValues)) {
    DispatchKeySet& keys = OpenTensorImpl::keysOf(*output.unsafeGetTensorImpl());
    keys = keys | DispatchKeySet{kWithoutValues};
    outputs_.push_back(output);
  }
}

}  // namespace torchext
