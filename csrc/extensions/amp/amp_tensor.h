#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <torchext/macros.h>

#include "../marks/tensor_marks.h"

namespace torchext {

// NOTE [AmpTensors]
//
// An AmpTensor is a tensor with a mark, NOTE [Marked tensors] in tensor_marks.h. Calls with such a tensor go to
// amp_handler.h, which marks the results; other calls are unaffected. The key of marked tensors is above autograd,
// autocast and torchext's keys: a fake or deferred AmpTensor is handled as such below it, and casts are recorded like
// any other operator.

// NOTE [Self-cleaning results]
//
// Results of operators in a self-cleaning region are AmpTensors of a second kind. The first kind, wrapped by a user,
// enables autocast outside of regions. The second kind does the opposite: the next operator that does not autocast
// casts it to float32.

// Returns true if a tensor of this dtype can be an AmpTensor: if it can require a gradient.
inline bool canBeAmp(const at::TensorBase& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

inline bool isAmp(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) != AmpMark::kNone;
}

// Returns true for the second kind.
inline bool isToBeCleaned(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) == AmpMark::kToBeCleaned;
}

// Makes `tensor` an AmpTensor of the first kind, for a call by the user. Works in place, like `requires_grad_()`: no
// other thread may access the tensor. Raises if the tensor cannot be marked.
TORCHEXT_API void wrap(const at::TensorBase& tensor);

// Raises the errors of wrap().
TORCHEXT_API void checkCanBeWrapped(const at::TensorBase& tensor);

// The same as wrap() for results of operators. These stay ordinary if they cannot be marked.
inline void makeAmp(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kWrapped);
}

// Makes `tensor` an AmpTensor of the second kind.
inline void markToBeCleaned(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kToBeCleaned);
}

// Copies the mark of `like` to `tensor`, which was made from `like` or its metadata without an operator.
inline void makeAmpLike(const at::TensorBase& tensor, const at::TensorBase& like) {
  const bool is_cleaned = isToBeCleaned(like) && tensor.scalar_type() != like.scalar_type();
  if (isAmp(like) && canBeAmp(tensor) && !is_cleaned) {
    setAmpMark(*tensor.unsafeGetTensorImpl(), ampMarkOf(*like.unsafeGetTensorImpl()));
  }
}

// Removes the mark of `tensor`.
inline void makeOrdinary(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kNone);
}

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

// Marks the results of a call as wrapped, to be cleaned, or neither, by its arguments. Arguments keep their marks, also
// written ones, unless a collective or FSDP moved wrapped tensors into them.
void markResults(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

// The same for a call that neither autocasts AmpTensors nor cleans: results in a self-cleaning region are marked to be
// cleaned.
void markResultsOfOthers(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const AmpArguments& arguments);

}  // namespace torchext
