#pragma once

// The functions that all rooms need to recognize and make fakes. Part of the public C++ API: fake/fake.h.

#include <ATen/core/Tensor.h>

#include "../../support/macros.h"

namespace torchext {

// Returns true while the data of `tensor` does not exist. A fake that has become real (NOTE [Becoming real]) is not
// fake. For a tensor without a storage, its layout decides: NOTE [Layouts].
TORCHEXT_API bool isFake(const at::TensorBase& tensor);

// Returns a fake tensor with the shape, strides, dtype, device and `requires_grad` of `tensor`, which may be real.
TORCHEXT_API at::Tensor fakeLike(const at::Tensor& tensor);

}  // namespace torchext
