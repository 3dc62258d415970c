#pragma once

// What all who meet fakes ask of them. A part of the public C++ API, which is fake/fake.h.

#include <ATen/core/Tensor.h>

#include "../../support/macros.h"

namespace torchext {

// True while the data of `tensor` does not exist. A fake that has become real (NOTE [Becoming real]) is not fake. Of
// one without a storage its layout knows: NOTE [Layouts].
TORCHEXT_API bool isFake(const at::TensorBase& tensor);

// Returns a fake tensor with the shape, strides, dtype, device and `requires_grad` of `tensor`, which may be real.
TORCHEXT_API at::Tensor fakeLike(const at::Tensor& tensor);

}  // namespace torchext
