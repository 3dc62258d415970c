#include "written_tensors.h"

#include "stack_utils.h"

namespace torchext {

WrittenTensors::WrittenTensors(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  forEachWritten(schema, arguments, [this](const at::Tensor& tensor, std::size_t /*position*/) {
    if (tensor.has_storage()) {
      entries_.push_back(
          {tensor, c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.storage().nbytes()});
    }
  });
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
