#pragma once

/// @file
/// Fake tensors: a shape, a dtype, a device and autograd's state, but no memory.

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// Returns true while the data of `tensor` does not exist. A fake that has become real, as deferred tensors do, is not
/// fake. An undefined tensor is not.
TORCHEXT_API bool isFake(const at::TensorBase& tensor);

/// Returns a fake with the shape, strides, dtype, device and `requires_grad` of `tensor`, which may be real.
///
/// @throws c10::NotImplementedError There are no fakes of the layout of `tensor`.
TORCHEXT_API at::Tensor fakeLike(const at::Tensor& tensor);

}  // namespace torchext
