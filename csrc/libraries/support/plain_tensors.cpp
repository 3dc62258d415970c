#include "plain_tensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>

#include "sizes.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

bool isPlain(const Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_nested();
}

std::size_t neededBytes(const c10::TensorImpl& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                          toSize(tensor.storage_offset()));
}

std::size_t neededBytes(const Tensor& tensor) {
  return neededBytes(*tensor.unsafeGetTensorImpl());
}

bool holdsItsElements(const Tensor& tensor) {
  return neededBytes(tensor) <= tensor.storage().nbytes();
}

Storage makeZeroStorage(std::size_t nbytes) {
  void* zeros = std::calloc(std::max<std::size_t>(nbytes, 1), 1);
  TORCH_CHECK_WITH(OutOfMemoryError, zeros != nullptr, "cannot allocate ", nbytes, " bytes of zeros");
  return Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, toSigned(nbytes),
                                                       c10::DataPtr{zeros, zeros, &std::free, c10::kCPU},
                                                       c10::GetCPUAllocator(), /*resizable=*/true)};
}

Tensor readOnlyZerosLike(const Tensor& tensor) {
  const std::size_t nbytes = neededBytes(tensor);
  const std::size_t size = std::max<std::size_t>(nbytes, 1);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-vararg,hicpp-vararg): POSIX declares it so
  void* zeros = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, zeros != MAP_FAILED, "cannot reserve ", nbytes, " bytes of zeros");
  const auto unmap = [size](void* address) { ::munmap(address, size); };
  return at::from_blob(zeros, tensor.sizes(), tensor.strides(), unmap, at::TensorOptions(tensor.scalar_type()));
}

Tensor makeStridedTensor(Storage storage,
                         c10::ScalarType dtype,
                         c10::IntArrayRef sizes,
                         c10::IntArrayRef strides,
                         std::int64_t storage_offset,
                         c10::DispatchKeySet bits) {
  const c10::DispatchKeySet keys{c10::computeDispatchKey(dtype, c10::kStrided, storage.device())};
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys | bits, c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(sizes, strides, storage_offset);
  return Tensor{std::move(impl)};
}

Tensor emptyOnMeta(const Tensor& tensor) {
  return tensor.layout() == c10::kStrided
             ? Tensor{at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type())}
             : Tensor{at::detail::empty_meta(tensor.sizes(), tensor.scalar_type())};
}

}  // namespace torchext
