#include "shadows.h"

#include <c10/core/StorageImpl.h>

#include "fake_storage.h"
#include "fake_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;

Tensor Shadows::of(const Tensor& tensor) {
  for (const auto& [original, shadow] : tensors_) {
    if (original.is_same(tensor)) {
      return shadow;
    }
  }
  // A Python number in tensor's clothes. Meta kernels that are Python functions get it back as a number, and for that
  // it must be on the CPU (`toPyObject()` in pybind_utils.cpp).
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided && tensor.has_storage(),
                              "Fake tensors are strided, but an argument has the layout ", tensor.layout(),
                              " and type ", tensor.toString(),
                              "; convert it with `to_dense()` before it meets a fake tensor.");
  DispatchKeySet keys{c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::kMeta)};
  keys = keys | (tensor.key_set() & kLazyBits);
  auto impl = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, of(tensor.storage()), keys, tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->set_allow_tensor_metadata_change(tensor.unsafeGetTensorImpl()->allow_tensor_metadata_change());
  return tensors_.emplace_back(tensor, Tensor{std::move(impl)}).second;
}

Storage Shadows::of(const Storage& storage) {
  for (const auto& [original, shadow] : storages_) {
    if (isSameStorage(original, storage)) {
      return shadow;
    }
  }
  Storage shadow{c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, static_cast<int64_t>(storage.nbytes()), c10::DataPtr{nullptr, c10::kMeta},
      c10::GetAllocator(c10::kMeta), /*resizable=*/true)};
  return storages_.emplace_back(storage, std::move(shadow)).second;
}

Tensor Shadows::originalOf(const TensorImpl& meta) const {
  for (const auto& [original, shadow] : tensors_) {
    if (shadow.unsafeGetTensorImpl() == &meta) {
      return original;
    }
  }
  return {};
}

const Tensor* Shadows::findTensorOn(const Storage& storage) const {
  for (const auto& [original, shadow] : tensors_) {
    if (isSameStorage(original.storage(), storage)) {
      return &original;
    }
  }
  return nullptr;
}

Storage Shadows::originalOf(const Storage& meta, c10::Device device) {
  for (const auto& [original, shadow] : storages_) {
    if (isSameStorage(shadow, meta)) {
      return original;
    }
  }
  return storages_.emplace_back(makeFakeStorage(meta.nbytes(), device), meta).first;
}

}  // namespace torchext
