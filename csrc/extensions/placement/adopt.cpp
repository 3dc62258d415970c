#include "adopt.h"

#include <cstdint>
#include <memory>
#include <utility>

#include <c10/core/StorageImpl.h>

#include "../../core/deferred_init/deferred_init.h"
#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/replay/replay.h"
#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/locks.h"
#include "place.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

void deleteOwner(void* owner) {
  delete static_cast<Storage*>(owner);
}

// Returns a storage with the bytes that `data` shows, which keeps the storage of `data` alive.
Storage storageOver(const Tensor& data) {
  void* memory = data.data_ptr();
  auto owner = std::make_unique<Storage>(data.storage());
  c10::DataPtr pointer{memory, owner.get(), &deleteOwner, data.device()};
  owner.release();  // NOLINT(bugprone-unused-return-value): now owned by `pointer`
  return Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, data.nbytes(),
                                                       std::move(pointer), /*allocator=*/nullptr,
                                                       /*resizable=*/false)};
}

bool showsAllInOrder(const Tensor& tensor) {
  return Geometry::of(tensor).isContiguous() && tensor.storage_offset() == 0 && tensor.numel() > 0 &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool isPlainMemory(const Tensor& data) {
  return data.layout() == c10::kStrided && data.has_storage() && !isFake(data) && !data.is_meta() && !data.is_conj() &&
         !data.is_neg() && data.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(data.const_data_ptr()) % data.itemsize() == 0;
}

bool canShow(const Tensor& deferred, const Tensor& data) {
  const StorageValuePtr value = isDeferred(deferred) ? valueOf(deferred) : nullptr;
  return value != nullptr && !value->isPinned() && deferred.sizes() == data.sizes() && showsAllInOrder(deferred) &&
         isPlainMemory(data);
}

}  // namespace

bool showData(const Tensor& deferred, const Tensor& data) {
  const Locked lock{LockRank::kReplay};
  if (!canShow(deferred, data) || deferred.device() != data.device() || deferred.dtype() != data.dtype()) {
    return false;
  }
  setValue(deferred.storage(), std::make_shared<StorageValue>(storageOver(data)));
  return true;
}

bool adopt(const Tensor& deferred, const Tensor& data) {
  const Locked lock{LockRank::kReplay};
  if (!canShow(deferred, data)) {
    return false;
  }
  const Storage fake = deferred.storage();
  const Move move = planMove(deferred, {data.device(), data.scalar_type()});
  if (!move.dtypes && deferred.scalar_type() != data.scalar_type()) {
    return false;
  }
  if (move.isNeeded()) {
    moveOnto(fake, storageOver(data), move, {deferred});
  } else {
    becomeReal(fake, storageOver(data));
  }
  return true;
}

}  // namespace torchext
