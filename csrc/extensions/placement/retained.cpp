#include "retained.h"

#include <algorithm>
#include <utility>

#include <c10/core/InferenceMode.h>

#include "../../core/deferred_init/replay/replay.h"
#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/locks.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

FakeTensorImpl* fakeTensorImpl(const Tensor& tensor) {
  return dynamic_cast<FakeTensorImpl*>(tensor.unsafeGetTensorImpl());
}

std::uint32_t versionOf(const Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

}  // namespace

Retained::Retained(const Storage& recorded, const std::vector<Tensor>& tensors)
    : value_{valueOf(recorded)}, nbytes_{recorded.nbytes()}, current_{recorded.getWeakStorageImpl()} {
  for (const Tensor& tensor : tensors) {
    holders_.push_back({tensor.unsafeGetTensorImpl(), Geometry::of(tensor)});
  }
}

void Retained::attach(const std::shared_ptr<Retained>& retained,
                      const Storage& current,
                      const std::vector<Tensor>& tensors) {
  if (retained->current_.lock().get() != current.unsafeGetStorageImpl()) {
    retained->recorded_.emplace(retained->current_.lock());
    retained->current_ = current.getWeakStorageImpl();
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    retained->holders_[i].version = versionOf(tensors[i]);
    fakeTensorImpl(tensors[i])->setRetained(retained);
    addToList(retained->tensors_, *fakeTensorImpl(tensors[i]));
  }
}

std::shared_ptr<Retained> Retained::of(const Tensor& tensor) {
  const FakeTensorImpl* impl = fakeTensorImpl(tensor);
  auto retained = impl == nullptr ? nullptr : std::dynamic_pointer_cast<Retained>(impl->retained());
  const bool is_current =
      retained != nullptr && retained->current_.lock().get() == tensor.storage().unsafeGetStorageImpl();
  return is_current ? retained : nullptr;
}

std::vector<Retained::Found> Retained::tensors() const {
  std::vector<Found> found;
  for (const Tensor& tensor : tensorsOn(tensors_)) {
    const auto is_its = [&tensor](const Holder& holder) { return holder.tensor == tensor.unsafeGetTensorImpl(); };
    if (of(tensor).get() == this) {
      found.push_back({tensor, &*std::find_if(holders_.begin(), holders_.end(), is_its)});
    }
  }
  return found;
}

// Sizes and strides may have been changed in place since, as by `t_()`. Conversions of the dtype are undone.
Geometry Retained::geometryAfterwards(const Found& found) const {
  Geometry geometry = Geometry::of(found.tensor);
  if (wasPlaced()) {
    geometry.dtype = found.holder->recorded.dtype;
    geometry.is_conj = found.holder->recorded.is_conj;
  }
  return geometry;
}

Geometry Retained::recordedGeometry(const Tensor& tensor) const {
  const std::vector<Found> found = tensors();
  const auto is_it = [&tensor](const Found& other) { return other.tensor.is_same(tensor); };
  return geometryAfterwards(*std::find_if(found.begin(), found.end(), is_it));
}

void Retained::checkFits() const {
  for (const Found& found : tensors()) {
    const Geometry geometry = geometryAfterwards(found);
    const std::size_t needed = geometry.bytesReached();
    TORCH_CHECK_VALUE(needed <= nbytes_, "A tensor of shape ", found.tensor.sizes(),
                      " cannot be deferred again, because it has been resized since it was materialized: it shows ",
                      needed, " bytes, but its recording makes ", nbytes_, ".");
  }
}

void Retained::deferAgain() const {
  const std::vector<Found> found = tensors();
  const Storage current{current_.lock()};
  // `Tensor.numpy()` (tensor_numpy.cpp) and shared memory mark a storage as not resizable.
  const bool is_lent = !current.resizable();
  const bool stays = !wasPlaced() && !is_lent;
  const Storage fake = stays ? current : recorded_.value_or(makeFakeStorage(nbytes_, current.device()));
  std::vector<Tensor> in_place;
  for (const Found& one : found) {
    removeResident(*fakeTensorImpl(one.tensor));
    fakeTensorImpl(one.tensor)->setRetained(nullptr);
    // An autograd graph that saved changed values must not use the recorded ones instead.
    if (!one.tensor.is_inference() && versionOf(one.tensor) != one.holder->version) {
      one.tensor.unsafeGetTensorImpl()->bump_version();
    }
    if (stays) {
      in_place.push_back(one.tensor);
    } else {
      moveTo(fake, one);
    }
  }
  if (!is_lent) {
    // Other tensors on the memory of a tensor that was placed elsewhere permanently find no data there.
    becomeFakeAgain(current, nbytes_, in_place);
  }
  setValue(fake, value_);
}

void Retained::moveTo(const Storage& fake, const Found& found) const {
  const Geometry geometry = geometryAfterwards(found);
  const c10::InferenceMode mode{found.tensor.is_inference()};
  const Tensor form = geometry.makeTensor(fake);
  found.tensor.set_data(makeFakeTensor(fake, *form.unsafeGetTensorImpl()));
}

void deferAgain(at::ArrayRef<Tensor> tensors) {
  const Locked lock{LockRank::kReplay};
  std::vector<std::shared_ptr<Retained>> all;
  std::vector<StorageValuePtr> values;
  for (const Tensor& tensor : tensors) {
    if (valueOf(tensor) != nullptr) {
      continue;
    }
    auto retained = Retained::of(tensor);
    TORCH_CHECK_VALUE(retained != nullptr, "A tensor of shape ", tensor.sizes(),
                      " cannot be deferred again, because its recording was not retained.");
    if (std::find(all.begin(), all.end(), retained) == all.end()) {
      retained->checkFits();
      values.push_back(retained->value());
      all.push_back(std::move(retained));
    }
  }
  Replay{values}.check();
  for (const auto& retained : all) {
    retained->deferAgain();
  }
}

Recording recordingOf(const Tensor& tensor) {
  if (const auto retained = Retained::of(tensor)) {
    return {retained->value(), retained->recordedGeometry(tensor)};
  }
  return {valueOf(tensor), Geometry::of(tensor)};
}

bool isRetained(const Tensor& tensor) {
  return Retained::of(tensor) != nullptr;
}

}  // namespace torchext
