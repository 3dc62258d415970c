#include "retained.h"

#include <algorithm>
#include <utility>

#include <c10/core/InferenceMode.h>

#include "../fake/fake.h"
#include "../fake/storage/fake_storage.h"
#include "../fake/storage/fake_tensor_impl.h"
#include "../support/locks.h"
#include "replay/replay.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

FakeTensorImpl* fakeTensorImpl(const Tensor& tensor) {
  return dynamic_cast<FakeTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Returns what the tensor has retained, which it may no longer show.
std::shared_ptr<Retained> retainedBy(const Tensor& tensor) {
  const FakeTensorImpl* impl = fakeTensorImpl(tensor);
  return impl == nullptr ? nullptr : std::dynamic_pointer_cast<Retained>(impl->retained());
}

std::uint32_t versionOf(const Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

}  // namespace

Retained::Retained(const Storage& recorded, const std::vector<Tensor>& tensors)
    : value_{valueOf(recorded)}, nbytes_{recorded.nbytes()}, current_{recorded.getWeakStorageImpl()} {
  for (const Tensor& tensor : tensors) {
    holders_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>{tensor.getIntrusivePtr()}, Geometry::of(tensor)});
  }
}

Retained::~Retained() = default;

void Retained::attach(const std::shared_ptr<Retained>& retained, const Storage& current) {
  if (retained->current_.lock().get() != current.unsafeGetStorageImpl()) {
    retained->recorded_.emplace(retained->current_.lock());
    retained->current_ = current.getWeakStorageImpl();
  }
  for (Holder& holder : retained->holders_) {
    if (auto impl = holder.tensor.lock()) {
      const Tensor tensor{std::move(impl)};
      holder.version = versionOf(tensor);
      fakeTensorImpl(tensor)->setRetained(retained);
    }
  }
}

std::shared_ptr<Retained> Retained::of(const Tensor& tensor) {
  auto retained = retainedBy(tensor);
  const bool is_current =
      retained != nullptr && retained->current_.lock().get() == tensor.storage().unsafeGetStorageImpl();
  return is_current ? retained : nullptr;
}

std::vector<Retained::Found> Retained::tensors() const {
  std::vector<Found> found;
  for (const Holder& holder : holders_) {
    if (auto impl = holder.tensor.lock()) {
      Tensor tensor{std::move(impl)};
      if (of(tensor).get() == this) {
        found.push_back({std::move(tensor), &holder});
      }
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

void Retained::forgetTensor(const c10::TensorImpl& tensor) {
  const Locked lock{LockRank::kReplay};
  for (Holder& holder : holders_) {
    if (holder.tensor._unsafe_get_target() == &tensor) {
      holder.tensor.reset();
    }
  }
}

void Retained::unlink(const c10::TensorImpl* tensor) {
  for (Holder& holder : holders_) {
    if (holder.tensor._unsafe_get_target() == tensor) {
      holder.tensor.reset();
      holder.unlinked = tensor;
    }
  }
}

void Retained::link(c10::TensorImpl* tensor) {
  for (Holder& holder : holders_) {
    if (holder.unlinked == tensor) {
      using Reference = c10::intrusive_ptr<c10::TensorImpl>;
      holder.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>{Reference::unsafe_reclaim_from_nonowning(tensor)};
      holder.unlinked = nullptr;
    }
  }
}

UnlinkedTensors::UnlinkedTensors(at::ArrayRef<Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    if (const auto retained = retainedBy(tensor)) {
      retained->unlink(tensor.unsafeGetTensorImpl());
      unlinked_.emplace_back(retained, tensor.unsafeGetTensorImpl());
    }
  }
}

UnlinkedTensors::~UnlinkedTensors() {
  for (const auto& [retained, tensor] : unlinked_) {
    retained->link(tensor);
  }
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
