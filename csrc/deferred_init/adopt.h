#pragma once

// Deferred tensors that become real with other data than those that were recorded for them.

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// Makes `deferred` real with the elements of `data`, in place, without copying them: the two share memory afterwards,
// whatever `data` is a view of. If `data` has another device or dtype, `deferred` goes there, with all other tensors
// that show its storage: NOTE [Becoming real elsewhere]. What was recorded for it is forgotten.
//
// Returns false, and has changed nothing, where that is not possible: unless `deferred` is deferred, shows all of its
// storage in order, is not pinned, and has the shape of `data`, which is real, in order and aligned.
//
// Raises ValueError when other tensors on the storage do not admit the dtype.
TORCHEXT_API bool adopt(const at::Tensor& deferred, const at::Tensor& data);

// Makes the elements of `data` the value of `deferred`, which stays deferred, without copying or reading them. `data`
// must not be written as long as something recorded refers to that value: RecordedValue::keepApart().
//
// Returns false, and has changed nothing, where `adopt()` would, or if `data` has another device or dtype.
TORCHEXT_API bool showData(const at::Tensor& deferred, const at::Tensor& data);

}  // namespace torchext
