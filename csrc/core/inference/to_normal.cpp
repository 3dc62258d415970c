#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/clone.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torchext/inference_mode.h>

#include "../../libraries/support/sizes.h"
#include "../fake/fake.h"
#include "../fake/storage/fake_storage.h"
#include "../fake/storage/fake_tensor_impl.h"
#include "../hooks/hooks.h"
#include "../torch_internals/open_tensor_impl.h"

namespace torchext {

// NOTE [Converting to normal tensors]
//
// An inference tensor lacks two keys and a version counter. Adding them makes it a normal tensor in place: all
// references to the TensorImpl see the change, and the Python object, its class, `requires_grad` and hooks stay. The
// no-aliasing invariant of the RFC must hold: a tensor that autograd may save must not share memory with an inference
// tensor, whose changes are not counted. So tensors that share memory and become normal together share one version
// counter. If other tensors also use the memory, they move to a copy of it.

using at::Tensor;
using c10::Storage;
using c10::TensorImpl;

namespace {

// Repeats the part of TensorImpl's constructor that inference mode skips.
void giveAutograd(TensorImpl& impl, const c10::VariableVersion& version) {
  for (const OnNormalTensor forget : hooks().on_normal_tensor) {
    forget(impl);
  }
  c10::DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = keys | c10::getAutogradRelatedKeySetFromBackend(keys.highestBackendKey());
  impl.set_version_counter(version);
}

// Returns the whole of `storage` as a tensor of bytes.
Tensor asBytes(const Storage& storage) {
  if (isFakeStorage(storage)) {
    return bytesOfStorage(storage);
  }
  const c10::DispatchKeySet keys{c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device())};
  auto impl = c10::make_intrusive<TensorImpl>(Storage{storage}, keys, caffe2::TypeMeta::Make<std::uint8_t>());
  impl->set_sizes_contiguous({toSigned(storage.nbytes())});
  return Tensor{std::move(impl)};
}

// A Python subclass that wraps other tensors reports a storage size, but has no memory.
bool hasMemory(const Storage& storage) {
  return isFakeStorage(storage) ||
         (storage.nbytes() != 0 && storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr);
}

// The inference tensors among the given tensors and the members of sparse ones, grouped by storage.
class InferenceTensors {
 public:
  void add(const Tensor& tensor);
  void makeNormal();

 private:
  void becomeNormalTogether(const Storage& storage, const std::vector<Tensor>& tensors) const;

  std::unordered_set<const TensorImpl*> seen_;
  std::vector<Tensor> without_storage_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Tensor>> by_storage_;
};

void InferenceTensors::add(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_inference() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) {
    return;
  }
  if (hooks().layouts.isSparse(tensor)) {
    for (const Tensor& member : hooks().layouts.membersOf(tensor)) {
      add(member);
    }
    without_storage_.push_back(tensor);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(),
                              "to_normal() takes strided and sparse tensors, but one has the "
                              "layout ",
                              tensor.layout(),
                              ". Make a normal tensor of it with `clone()` outside "
                              "inference mode.");
  by_storage_[tensor.storage().unsafeGetStorageImpl()].push_back(tensor);
}

void InferenceTensors::makeNormal() {
  for (const Tensor& tensor : without_storage_) {
    giveAutograd(*tensor.unsafeGetTensorImpl(), c10::VariableVersion{0});
  }
  for (const auto& [impl, tensors] : by_storage_) {
    becomeNormalTogether(tensors.front().storage(), tensors);
  }
}

void InferenceTensors::becomeNormalTogether(const Storage& storage, const std::vector<Tensor>& tensors) const {
  const bool is_theirs_alone = storage.use_count() <= tensors.size();
  const Storage own = is_theirs_alone || !hasMemory(storage) ? storage : asBytes(storage).clone().storage();
  const c10::VariableVersion version{0};
  for (const Tensor& tensor : tensors) {
    TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (!isSameStorage(own, impl.storage())) {
      FakeTensorImpl::moveTo(impl, own);
    }
    giveAutograd(impl, version);
  }
}

}  // namespace

void makeNormal(at::ArrayRef<Tensor> tensors) {
  const NormalTensors guard;
  InferenceTensors inference;
  for (const Tensor& tensor : tensors) {
    inference.add(tensor);
  }
  inference.makeNormal();
}

}  // namespace torchext
