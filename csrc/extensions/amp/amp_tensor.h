#pragma once

#include <ATen/core/Tensor.h>
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

}  // namespace torchext
