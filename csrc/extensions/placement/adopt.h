#pragma once

// Makes deferred tensors real with other data than the recorded ones.

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// Makes `deferred` real with the elements of `data`, in place, without copying them: the two share memory afterwards,
// even if `data` is a view. If `data` has another device or dtype, `deferred` moves there, with all other tensors that
// show its storage: NOTE [Materializing elsewhere]. Its recording is dropped.
//
// Returns false, and changes nothing, unless `deferred` is deferred, shows all of its storage in order, is not pinned,
// and has the shape of `data`, which must be real, contiguous and aligned.
//
// Raises ValueError if other tensors on the storage do not allow the dtype.
TORCHEXT_API bool adopt(const at::Tensor& deferred, const at::Tensor& data);

// Makes the elements of `data` the value of `deferred`, which stays deferred, without copying or reading them. `data`
// must not be written while a recorded operator or tensor refers to that value: RecordedValue::keepApart().
//
// Returns false, and changes nothing, if `adopt()` would, or if `data` has another device or dtype.
TORCHEXT_API bool showData(const at::Tensor& deferred, const at::Tensor& data);

}  // namespace torchext
