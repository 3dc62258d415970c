#pragma once

// The way from recorded values to real ones: for good, or for a look.

#include <vector>

#include <ATen/core/Tensor.h>

#include "op_graph.h"

namespace torchext {

// Makes `tensors` real, in place, in one pass over the graph: NOTE [Becoming real]. Every tensor that shows the same
// storages becomes real with them. Real tensors are left alone; a fake that was never recorded is an error. On an error
// all tensors are as they were.
void materialize(at::ArrayRef<at::Tensor> tensors);

// Returns a real tensor with the value that `deferred` will have, and leaves `deferred` as it is.
at::Tensor evaluate(const at::Tensor& deferred);

// Computes `values` into storages that nobody else refers to. With `keep_small`, what is small is kept in the graph
// too, so that a constructor that reads values again and again does not compute them again and again; then the caller
// must not write into the storages.
std::vector<c10::Storage> computeValues(const std::vector<StorageValuePtr>& values, bool keep_small);

}  // namespace torchext
