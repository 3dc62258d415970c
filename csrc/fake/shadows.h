#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace torchext {

// The storages and tensors of one call, each beside its shadow on the meta device. Shadows live as long as the call.
class Shadows {
 public:
  // The shadow of `tensor`, the same one each time that it is asked for. For a real tensor too: it counts by its
  // metadata.
  at::Tensor of(const at::Tensor& tensor);

  // The storage that stands for `storage` on the meta device.
  c10::Storage of(const c10::Storage& storage);

  // The tensor whose shadow `meta` is, or an undefined tensor.
  at::Tensor originalOf(const c10::TensorImpl& meta) const;

  // A tensor among the arguments that lives on `storage`, or null.
  const at::Tensor* findTensorOn(const c10::Storage& storage) const;

  // The storage whose shadow `meta` is; a new fake storage on `device` when there is none yet.
  c10::Storage originalOf(const c10::Storage& meta, c10::Device device);

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // original, shadow
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // original, shadow
};

}  // namespace torchext
