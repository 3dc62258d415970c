#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Returns true for strided tensors whose values are in their storage alone: not for those of another layout, nor for
// quantized or nested ones.
bool isPlain(const at::Tensor& tensor);

// Returns how many bytes of its storage a plain tensor needs: from the beginning of the storage to the end of its last
// element.
std::size_t neededBytes(const at::Tensor& tensor);

// Returns false if the storage of a plain tensor has been made too small for it, as by `untyped_storage().resize_(0)`.
bool holdsItsElements(const at::Tensor& tensor);

// Makes a storage of zeros on the CPU. A large one takes no memory where nothing is written: `calloc()` gets it from
// the operating system, which allocates pages of zeros when they are first touched.
c10::Storage makeZeroStorage(std::size_t nbytes);

// The same for storages that are only read: takes address space, but no memory, whatever its size. A write ends the
// process.
c10::Storage makeReadOnlyZeroStorage(std::size_t nbytes);

// Makes a tensor on `storage`, and on its device. `bits` are keys that say how to read it, such as `Conjugate`.
at::Tensor makeStridedTensor(c10::Storage storage,
                             c10::ScalarType dtype,
                             c10::IntArrayRef sizes,
                             c10::IntArrayRef strides,
                             std::int64_t storage_offset,
                             c10::DispatchKeySet bits);

// Makes a tensor on the meta device with the sizes, strides and dtype of `tensor`, on a storage of its own.
at::Tensor emptyOnMeta(const at::Tensor& tensor);

}  // namespace torchext
