#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

namespace torchext {

// Returns true for strided tensors whose values are entirely in their storage: not for other layouts, and not for
// quantized or nested tensors.
bool isPlain(const at::Tensor& tensor);

// Returns the number of bytes of its storage that a plain tensor needs, from the beginning of the storage to the end of
// its last element.
std::size_t neededBytes(const c10::TensorImpl& tensor);
std::size_t neededBytes(const at::Tensor& tensor);

// Returns false if the storage of a plain tensor is too small for it, for example after `untyped_storage().resize_(0)`.
bool holdsItsElements(const at::Tensor& tensor);

// Makes a storage of zeros on the CPU. A large one uses memory only where it is written: `calloc()` gets it from the
// operating system, which allocates pages of zeros when they are first touched.
c10::Storage makeZeroStorage(std::size_t nbytes);

// Makes zeros on the CPU with the sizes, strides and dtype of `tensor`. They use address space but no memory, for any
// size, and are only for reading: a write ends the process with a segmentation fault. Raises OutOfMemoryError for a
// size beyond the address space.
TORCHEXT_API at::Tensor readOnlyZerosLike(const at::Tensor& tensor);

// Makes a tensor on `storage` and its device. `bits` are keys that change how it is read, such as `Conjugate`.
at::Tensor makeStridedTensor(c10::Storage storage,
                             c10::ScalarType dtype,
                             c10::IntArrayRef sizes,
                             c10::IntArrayRef strides,
                             std::int64_t storage_offset,
                             c10::DispatchKeySet bits);

// Makes a tensor on the meta device with the sizes, strides and dtype of `tensor`, on a new storage. For a tensor of
// another layout, makes a contiguous one. Calls no operator.
TORCHEXT_API at::Tensor emptyOnMeta(const at::Tensor& tensor);

}  // namespace torchext
