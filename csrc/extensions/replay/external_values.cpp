#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"
#include "../digests/digest.h"
#include "../support/registrations.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

// The storages that small tensors were copied to, for as long as a recording refers to them. They are never written.
class SharedCopies {
 public:
  // Returns a storage that holds `bytes` from `offset` on. Threads that request equal bytes at the same time may get
  // separate copies.
  Storage of(const Tensor& bytes, std::size_t offset) {
    const std::uint64_t key = digestOf(bytes).first ^ offset;
    for (const Storage& known : storagesWith(key)) {
      if (holds(known, bytes, offset)) {
        return known;
      }
    }
    const auto size = toSigned(offset + bytes.nbytes());
    Storage copy = at::empty({size}, at::TensorOptions(c10::kByte).device(bytes.device())).storage();
    bytesAt(copy, offset, bytes.nbytes()).copy_(bytes);
    add(key, copy);
    return copy;
  }

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  static bool holds(const Storage& storage, const Tensor& bytes, std::size_t offset) {
    return storage.device() == bytes.device() && storage.nbytes() == offset + bytes.nbytes() &&
           bytesAt(storage, offset, bytes.nbytes()).equal(bytes);
  }

  // Only references are taken and kept under the lock. No tensor is made, read or freed under it: a tracker of real
  // memory takes locks for that.
  std::vector<Storage> storagesWith(std::uint64_t key) {
    std::vector<Storage> found;
    const Locked lock{LockRank::kSharedCopies};
    const auto [begin, end] = copies_.equal_range(key);
    for (auto entry = begin; entry != end; ++entry) {
      if (Storage known{entry->second.lock()}) {
        found.push_back(std::move(known));
      }
    }
    return found;
  }

  void add(std::uint64_t key, const Storage& copy) {
    const Locked lock{LockRank::kSharedCopies};
    dropFreed();
    copies_.emplace(key, copy.getWeakStorageImpl());
  }

  void dropFreed() {
    if (copies_.size() < limit_) {
      return;
    }
    for (auto entry = copies_.begin(); entry != copies_.end();) {
      entry = entry->second.expired() ? copies_.erase(entry) : std::next(entry);
    }
    limit_ = 2 * copies_.size() + 64;
  }

  std::unordered_multimap<std::uint64_t, WeakStorage> copies_;
  // The number of entries above which entries of freed storages are dropped.
  std::size_t limit_ = 64;
};

// Leaked, since recordings may be made until the process ends.
SharedCopies& sharedCopies() {
  static auto* copies = new SharedCopies;
  return *copies;
}

Storage sharedCopyOf(const Tensor& bytes, std::size_t offset) {
  return sharedCopies().of(bytes, offset);
}

IsUnchanged watch(const Tensor& tensor) {
  return [tensor, digest = digestOf(tensor)] { return digestOf(tensor) == digest; };
}

}  // namespace

void registerExternalValues() {
  hooks().external_values.copyOf = &sharedCopyOf;
  hooks().external_values.watch = &watch;
}

}  // namespace torchext
