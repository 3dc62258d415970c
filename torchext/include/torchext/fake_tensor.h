#pragma once

/// @file
/// Fake tensors: a shape, a dtype, a device and autograd state, but no memory.

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

/// Returns true while `tensor` has no data. Returns false for a deferred tensor that has become real, and for an
/// undefined tensor.
TORCHEXT_API bool isFake(const at::TensorBase& tensor);

/// Returns a fake tensor with the shape, strides, dtype, device and `requires_grad` of `tensor`, which may be real.
///
/// @throws c10::NotImplementedError Fake tensors do not support the layout of `tensor`.
TORCHEXT_API at::Tensor fakeLike(const at::Tensor& tensor);

}  // namespace torchext
