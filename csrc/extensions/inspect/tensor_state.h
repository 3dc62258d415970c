#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// The state of a tensor, other than its shape and its values.
struct TensorState {
  std::vector<c10::DispatchKey> keys;  // in the order in which the dispatcher visits them
  // None for inference tensors, which have no version counter.
  std::optional<std::int64_t> version;
  // Whether the tensor has an `AutogradMeta`. It costs memory, and is made when autograd first stores something in it.
  bool has_autograd_metadata;
  // Equal for tensors that share a storage, while one of them lives. None if the tensor has no storage.
  std::optional<std::uintptr_t> storage;
  bool is_fake;
  bool is_deferred;
  bool is_inference;
  bool requires_grad;
  bool is_leaf;
  bool is_view;
  // The name of the `CreationMeta` of a view that autograd tracks. It determines whether in-place writes are allowed.
  std::optional<std::string> creation_metadata;
};

// Returns the state of `tensor` without side effects: creates neither autograd metadata nor the `grad_fn` of a view
// whose base was written to. Calls no operator.
TORCHEXT_API TensorState stateOf(const at::Tensor& tensor);

}  // namespace torchext
