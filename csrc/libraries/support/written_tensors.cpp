#include "written_tensors.h"

#include <c10/util/irange.h>

#include "stack_utils.h"

namespace torchext {

WrittenTensors::WrittenTensors(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const auto note = [this](const at::Tensor& tensor) {
    if (tensor.has_storage()) {
      entries_.push_back(
          {tensor, c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.storage().nbytes()});
    }
  };
  for (const auto i : c10::irange(arguments.size())) {
    if (isWritten(schema.arguments()[i])) {
      forEachTensor(arguments[i], note);
    }
  }
}

void WrittenTensors::appendChanged(torch::jit::Stack& stack) const {
  for (const Entry& entry : entries_) {
    const bool is_same = entry.tensor.sizes() == c10::IntArrayRef(entry.sizes) &&
                         entry.tensor.strides() == c10::IntArrayRef(entry.strides) &&
                         entry.tensor.storage().nbytes() == entry.nbytes;
    stack.push_back(is_same ? c10::IValue{} : c10::IValue{entry.tensor});
  }
}

void WrittenTensors::restoreGeometry() const {
  for (const Entry& entry : entries_) {
    entry.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(entry.sizes, entry.strides);
  }
}

}  // namespace torchext
