#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

namespace torchext {

// The tensors that a call writes according to its schema, in order, as they were before the call. Tensors without a
// storage are left out.
class WrittenTensors {
 public:
  WrittenTensors(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

  // Appends each of them if its sizes, strides or storage size have changed, and None in its place otherwise.
  void appendChanged(torch::jit::Stack& stack) const;

  // Gives each of them its sizes and strides back, but not its offset, and not the size of its storage.
  void restoreGeometry() const;

 private:
  struct Entry {
    at::Tensor tensor;
    c10::DimVector sizes;
    c10::DimVector strides;
    std::size_t nbytes;
  };
  std::vector<Entry> entries_;
};

}  // namespace torchext
