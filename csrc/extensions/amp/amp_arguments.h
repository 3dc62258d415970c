#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace torchext {

// The properties of the arguments of a call that decide its handling.
struct AmpArguments {
  AmpArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // All tensors, and those that the call writes. For operators on lists, only tensors in lists.
  c10::SmallVector<at::Tensor, 4> all;
  c10::SmallVector<at::Tensor, 2> written;
  // Whether any of them is wrapped, and the autocast keys for the devices of the wrapped ones.
  bool has_wrapped = false;
  c10::DispatchKeySet autocast_keys;
  // For operators that apply to each element of lists (`_foreach_add_`, `_fused_adam_`): whether element i involves a
  // wrapped tensor. Empty for all other operators, and if no tensor is wrapped.
  std::vector<bool> has_wrapped_at;
  // The dtype of a tensor for which isUnclean() holds, or Undefined.
  at::ScalarType unclean = at::ScalarType::Undefined;
  // The storages of tensors that will be cleaned, by this call or a later one.
  c10::SmallVector<const c10::StorageImpl*, 2> to_be_cleaned;
  // Whether they have different dtypes among those that autocast casts.
  bool is_mixture = false;

 private:
  void inspectTensor(const at::Tensor& tensor);
};

// Returns true if operators autocast for the device of `tensor` here, or around the compiled code that runs here.
bool isAutocastingFor(const at::Tensor& tensor);

// Returns true if `tensor` is marked to be cleaned, is not in float32, and operators do not autocast for it.
bool isUnclean(const at::Tensor& tensor);

}  // namespace torchext
