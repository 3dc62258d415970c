#pragma once

// The value of a deferred tensor as an object, to be compared and put back.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "graph/op_graph.h"

namespace torchext {

// What a deferred tensor shows at some time: the value of its storage. It can be compared with what the tensor shows
// later, and put back. Keeps the storage and the recording alive.
class TORCHEXT_API RecordedValue {
 public:
  // Raises ValueError unless `tensor` is deferred.
  explicit RecordedValue(const at::Tensor& tensor);

  // Returns true if `tensor` shows this value: no write to its storage has been recorded since, it has been given no
  // other data, and it has not become real.
  bool isOf(const at::Tensor& tensor) const;

  // Makes it the value of its storage again, for all tensors there. Does nothing if the storage has become real.
  void putBack() const;

  // Copies the data of a value that `showData()` has made, if something recorded still refers to it. To be called
  // before these data are written.
  void keepApart() const;

 private:
  c10::Storage storage_;
  StorageValuePtr value_;
};

}  // namespace torchext
