#pragma once

// The value of a deferred tensor as an object that can be compared and restored.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/graph/op_graph.h"

namespace torchext {

// The value that a deferred tensor shows at some time. It can be compared with the tensor's later value, and restored.
// Keeps the storage and the recording alive.
class TORCHEXT_API RecordedValue {
 public:
  // Raises ValueError unless `tensor` is deferred.
  explicit RecordedValue(const at::Tensor& tensor);

  // Returns true if `tensor` shows this value: no write to its storage has been recorded since, its data have not been
  // replaced, and it has not become real.
  bool isOf(const at::Tensor& tensor) const;

  // Makes it the value of its storage again, for all tensors on it. Does nothing if the storage has become real.
  void putBack() const;

  // Copies the data of a value that `showData()` made, if a recorded operator or tensor still refers to it. Call it
  // before these data are written.
  void keepApart() const;

 private:
  c10::Storage storage_;
  StorageValuePtr value_;
};

}  // namespace torchext
