#include "resizable_outputs.h"

#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../libraries/support/stack_utils.h"
#include "../torch_internals/open_tensor_impl.h"
#include "calls/op_traits.h"
#include "storage/fake_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

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
