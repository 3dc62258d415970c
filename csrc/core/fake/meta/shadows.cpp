#include "shadows.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/sizes.h"
#include "../../hooks/hooks.h"
#include "../calls/hidden_keys.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "../storage/storage_memory.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;

namespace {

Storage makeMetaStorage(std::size_t nbytes) {
  return Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, toSigned(nbytes),
                                                       c10::DataPtr{nullptr, c10::kMeta}, c10::GetAllocator(c10::kMeta),
                                                       /*resizable=*/true)};
}

Storage fakeStorageLike(const Storage& storage) {
  return makeFakeStorage(storage.nbytes(), storage.device(), isPinnedStorage(storage));
}

// Returns a tensor on `storage`, which is on the meta device, with the metadata of `tensor`.
Tensor metaOf(const Tensor& tensor, Storage storage) {
  DispatchKeySet keys{c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::kMeta)};
  keys = keys | (tensor.key_set() & kLazyBits);
  auto impl = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->set_allow_tensor_metadata_change(tensor.unsafeGetTensorImpl()->allow_tensor_metadata_change());
  return Tensor{std::move(impl)};
}

}  // namespace

Tensor realNumber(const Tensor& number) {
  if (!isFake(number)) {
    return number;
  }
  const HiddenCalls guard;
  Tensor zero = at::zeros(number.sizes(), at::TensorOptions(number.scalar_type()).device(c10::kCPU));
  zero.unsafeGetTensorImpl()->set_wrapped_number(true);
  return zero;
}

Tensor Shadows::of(const Tensor& tensor) {
  if (const Tensor* known = substitution_.substituteOf(tensor)) {
    return *known;
  }
  // Meta kernels written in Python receive a wrapped number as a Python number, which requires it to be on the CPU
  // (`toPyObject()` in pybind_utils.cpp).
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return realNumber(tensor);
  }
  if (hooks().layouts.isSparse(tensor)) {
    return emptyOnMeta(tensor);  // for operators whose results do not depend on the layout
  }
  Tensor shadow = kind_ == Kind::kMeta ? metaOf(tensor, of(tensor.storage()))
                                       : makeFakeTensor(of(tensor.storage()), *tensor.unsafeGetTensorImpl());
  substitution_.add(tensor, shadow);
  return shadow;
}

Storage Shadows::of(const Storage& storage) {
  if (const Storage* known = substitution_.substituteOf(storage)) {
    return *known;
  }
  Storage shadow = kind_ == Kind::kMeta ? makeMetaStorage(storage.nbytes()) : fakeStorageLike(storage);
  substitution_.add(storage, shadow);
  return shadow;
}

}  // namespace torchext
