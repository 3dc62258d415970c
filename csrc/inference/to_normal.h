#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "../support/macros.h"

namespace torchext {

// NOTE [Becoming normal]
//
// What makes an inference tensor is that it lacks two keys and a version counter, so giving them to it makes a normal
// tensor of it, in place: every holder of the TensorImpl sees that, and Python's object, its class, `requires_grad` and
// hooks stay. What must hold is the RFC's no-aliasing invariant: a tensor that autograd may save must not share memory
// with an inference tensor, whose changes nobody counts. So tensors that share memory and become normal together share
// one version counter from then on, and if anybody else holds the memory, they move to a copy of it.

// Makes normal tensors of the inference tensors among `tensors`, real or fake; leaves others alone. Those that share
// memory must be given together to go on sharing it. Raises for a layout that is neither strided nor sparse before
// anything has changed.
TORCHEXT_API void makeNormal(at::ArrayRef<at::Tensor> tensors);

}  // namespace torchext
