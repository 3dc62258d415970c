#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include "../macros.h"

namespace torchext {

// NOTE [The identity of AmpTensors]
//
// That a tensor is an AmpTensor is one more dispatch key that it carries: any operator that meets one is met by the
// fallback of that key (amp_handler.h), all others know nothing of it. PyTorch copies the keys of a tensor to its
// views, and to what `detach()`, `.data` and `Parameter()` make of it, so it survives those by itself; the fallback
// gives it to results. It takes the place that PyTorch has for modes in tests, which is above autograd, autocast and
// our own keys: what is fake or deferred is so below, and casts are recorded as any other operator is.
constexpr c10::DispatchKey kAmpKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// NOTE [Results that are to be cleaned]
//
// What operators make inside of a self-cleaning region is an AmpTensor of a second kind. The first kind, which a user
// has wrapped, asks for autocast where no region is open; this one asks for the opposite: to be cast to float32 by the
// next operator that does not autocast. A key has no room for which of the two it is, so the second kind also carries a
// `BackendMeta`, which PyTorch copies along with the keys and has no use for on the devices that it knows itself.

// Can a tensor of this dtype be an AmpTensor? Those that can require a gradient can.
inline bool canBeAmp(const at::TensorBase& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

inline bool isAmp(const at::TensorBase& tensor) {
  return tensor.key_set().has(kAmpKey);
}

// Of the second kind?
inline bool isToBeCleaned(const at::TensorBase& tensor);

// Makes `tensor` an AmpTensor of the first kind, whatever it was. In place, as `requires_grad_()`: no other thread may
// look at the tensor.
TORCHEXT_API void makeAmp(const at::TensorBase& tensor);

// The same for the second kind.
void markToBeCleaned(const at::TensorBase& tensor);

// Makes `tensor` an ordinary one.
TORCHEXT_API void makeOrdinary(const at::TensorBase& tensor);

// Implementation.

// There is one for all tensors: the meta of an ordinary tensor is null, and on PrivateUse1 somebody else's.
const c10::BackendMeta* cleaningMark();

inline bool isToBeCleaned(const at::TensorBase& tensor) {
  return isAmp(tensor) && tensor.unsafeGetTensorImpl()->get_backend_meta() == cleaningMark();
}

}  // namespace torchext
