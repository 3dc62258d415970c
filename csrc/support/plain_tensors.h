#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// True for strided tensors whose storage is all that there is to their values: not those of another layout, quantized
// or nested ones.
bool isPlain(const at::Tensor& tensor);

// How many bytes of its storage a plain tensor needs: from the beginning of the storage to the end of its last element.
std::size_t neededBytes(const at::Tensor& tensor);

// False when the storage of a plain tensor has been made too small for it, as by `untyped_storage().resize_(0)`.
bool holdsItsElements(const at::Tensor& tensor);

// A storage of zeros on the CPU. Large ones take no memory where nothing is written: `calloc()` takes them from the
// kernel, which hands out pages of zeros when they are first touched.
c10::Storage makeZeroStorage(std::size_t nbytes);

// The same for what is only looked at: it takes address space and no memory, whatever its size is. A write ends the
// process.
c10::Storage makeReadOnlyZeroStorage(std::size_t nbytes);

// A tensor on `storage`, of its device. `bits` say how it is to be read, as `Conjugate` does.
at::Tensor makeStridedTensor(c10::Storage storage,
                             c10::ScalarType dtype,
                             c10::IntArrayRef sizes,
                             c10::IntArrayRef strides,
                             std::int64_t storage_offset,
                             c10::DispatchKeySet bits);

// A tensor on the meta device with the sizes, strides and dtype of `tensor`, on a storage of its own.
at::Tensor emptyOnMeta(const at::Tensor& tensor);

}  // namespace torchext
