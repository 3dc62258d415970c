#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torchext {

// What a tensor is, beside its shape and its values.
struct TensorState {
  std::vector<c10::DispatchKey> keys;  // in the order in which the dispatcher visits them
  // None where the tensor has no version counter: an inference tensor.
  std::optional<std::int64_t> version;
  // True when the `AutogradMeta` exists, which costs memory and is made when something has to be put into it.
  bool has_autograd_metadata;
  // Equal for tensors that share a storage, while one of them lives. None where the tensor has no storage.
  std::optional<std::uintptr_t> storage;
  bool is_fake;
  bool is_deferred;
  bool is_inference;
  bool requires_grad;
  bool is_leaf;
  bool is_view;
  // The name of the `CreationMeta` of a view that autograd knows, which decides whether it may be written in place.
  std::optional<std::string> creation_metadata;
};

// Looks at `tensor` and neither changes it nor makes anything for it: no autograd metadata, no `grad_fn` of a view
// whose base was written to. Calls no operator.
TensorState stateOf(const at::Tensor& tensor);

}  // namespace torchext
