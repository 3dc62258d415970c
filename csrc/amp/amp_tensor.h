#pragma once

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "../marks/tensor_marks.h"

namespace torchext {

// NOTE [AmpTensors]
//
// That a tensor is an AmpTensor is a mark on it, NOTE [Marked tensors] in tensor_marks.h: any operator that meets one
// is met by amp_handler.h, all others know nothing of it. The handler gives it to results. The key of marked tensors is
// above autograd, autocast and our own keys: what is fake or deferred is so below, and casts are recorded as any other
// operator is.

// NOTE [Results that are to be cleaned]
//
// What operators make inside of a self-cleaning region is an AmpTensor of a second kind. The first kind, which a user
// has wrapped, asks for autocast where no region is open; this one asks for the opposite: to be cast to float32 by the
// next operator that does not autocast.

// Can a tensor of this dtype be an AmpTensor? Those that can require a gradient can.
inline bool canBeAmp(const at::TensorBase& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

inline bool isAmp(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) != AmpMark::kNone;
}

// Of the second kind?
inline bool isToBeCleaned(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) == AmpMark::kToBeCleaned;
}

// Makes `tensor` an AmpTensor of the first kind, whatever it was, for a user who has asked for it. In place, as
// `requires_grad_()`: no other thread may look at the tensor. Raises when the tensor cannot be marked.
TORCHEXT_API void wrap(const at::TensorBase& tensor);

// Raises what wrap() would.
TORCHEXT_API void checkCanBeWrapped(const at::TensorBase& tensor);

// The same as wrap() for results of operators, which stay ordinary where they cannot be marked.
inline void makeAmp(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kWrapped);
}

// Makes `tensor` an AmpTensor of the second kind.
inline void markToBeCleaned(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kToBeCleaned);
}

// Makes `tensor`, which has been made of `like` or of its metadata by other means than an operator, what that is.
inline void makeAmpLike(const at::TensorBase& tensor, const at::TensorBase& like) {
  const bool is_cleaned = isToBeCleaned(like) && tensor.scalar_type() != like.scalar_type();
  if (isAmp(like) && canBeAmp(tensor) && !is_cleaned) {
    setAmpMark(*tensor.unsafeGetTensorImpl(), ampMarkOf(*like.unsafeGetTensorImpl()));
  }
}

// Makes `tensor` an ordinary one.
inline void makeOrdinary(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kNone);
}

}  // namespace torchext
