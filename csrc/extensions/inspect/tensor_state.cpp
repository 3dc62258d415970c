#include "tensor_state.h"

#include <algorithm>

#include "../../core/deferred_init/deferred_init.h"
#include "../../core/fake/fake.h"
#include "../support/autograd.h"

namespace torchext {

using at::Tensor;

namespace {

std::vector<c10::DispatchKey> keysOf(const Tensor& tensor) {
  std::vector<c10::DispatchKey> keys;
  for (const c10::DispatchKey key : tensor.key_set()) {
    keys.push_back(key);
  }
  std::reverse(keys.begin(), keys.end());
  return keys;
}

std::optional<std::int64_t> versionOf(const c10::TensorImpl& impl) {
  const c10::VariableVersion& version = impl.version_counter();
  return version.enabled() ? std::optional<std::int64_t>{version.current_version()} : std::nullopt;
}

// `TensorImpl::storage()` raises for wrappers such as those of torch.func.
std::optional<std::uintptr_t> storageOf(const c10::TensorImpl& impl) {
  const c10::Storage& storage = impl.unsafe_storage();
  if (!storage) {
    return std::nullopt;
  }
  return reinterpret_cast<std::uintptr_t>(storage.unsafeGetStorageImpl());  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

TensorState stateOf(const Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto creation = creationMetadataOf(tensor);
  return {keysOf(tensor),
          versionOf(impl),
          impl.autograd_meta() != nullptr,
          storageOf(impl),
          isFake(tensor),
          isDeferred(tensor),
          tensor.is_inference(),
          tensor.requires_grad(),
          tensor.is_leaf(),
          creation.has_value(),
          creation};
}

}  // namespace torchext
