#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace torchext {

// What is known of the arguments of a call before it is made.
struct AmpArguments {
  AmpArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // All tensors, and those that the call writes; of an operator on lists only those in lists.
  c10::SmallVector<at::Tensor, 4> all;
  c10::SmallVector<at::Tensor, 2> written;
  // Is any of them wrapped? And the keys of autocast on the devices of those.
  bool has_wrapped = false;
  c10::DispatchKeySet autocast_keys;
  // For operators that are one for each element of lists (`_foreach_add_`, `_fused_adam_`): does element i meet a
  // wrapped tensor? Empty for all other operators, and where nothing is wrapped.
  std::vector<bool> has_wrapped_at;
  // The dtype of one that isUnclean(), and Undefined when there is none.
  at::ScalarType unclean = at::ScalarType::Undefined;
  // The memory of those that are to be cleaned, here or elsewhere.
  c10::SmallVector<const c10::StorageImpl*, 2> to_be_cleaned;
  // Are they in different dtypes, of those that autocast casts?
  bool is_mixture = false;

 private:
  void lookAt(const at::Tensor& tensor);
};

// Do operators autocast here for the device of `tensor`, or around the compiled code that runs here?
bool isAutocastingFor(const at::Tensor& tensor);

// Is `tensor` to be cleaned, and not in float32 yet, and do operators not autocast for it?
bool isUnclean(const at::Tensor& tensor);

}  // namespace torchext
