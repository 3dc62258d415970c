// NOTE [Computed values]
//
// A constructor that reads values (`w.norm().item()`), or draws by them (`torch.multinomial(w, 1)`), computes them
// while it runs. If the next read started from scratch, a loop that uses its own results would take quadratic time:
//
//     for _ in range(1000):
//         w[torch.multinomial(w, 1)] += 1
//
// So values that were computed for a read are cached, both the requested ones and those that led to them, if a tensor
// shows them: a constant with the same bytes is kept next to the recorded value, and later replays begin there. The
// recorded operators stay, because explanations, digests and other processes need them. The oldest constants are
// dropped when all together exceed 256 MiB. A constant is also dropped with its value.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <numeric>
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

// ---- Computed values ----

constexpr std::size_t kMostBytes = std::size_t{256} << 20U;

struct Entry {
  std::weak_ptr<const StorageValue> value;
  std::size_t nbytes;
};

// The values that have constants, the oldest first.
class ComputedCache {
 public:
  void add(const StorageValue& value, std::size_t nbytes) {
    constexpr std::size_t kFew = 64;
    if (entries_.size() > 2 * alive_ + kFew) {
      dropFreed();
    }
    entries_.push_back({value.weak_from_this(), nbytes});
    nbytes_ += nbytes;
    while (nbytes_ > kMostBytes) {
      dropOldest();
    }
  }

 private:
  void dropFreed() {
    const auto freed =
        std::remove_if(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.value.expired(); });
    entries_.erase(freed, entries_.end());
    alive_ = entries_.size();
    nbytes_ = std::accumulate(entries_.begin(), entries_.end(), std::size_t{0},
                              [](std::size_t sum, const Entry& entry) { return sum + entry.nbytes; });
  }

  void dropOldest() {
    const Entry oldest = std::move(entries_.front());
    entries_.pop_front();
    nbytes_ -= oldest.nbytes;
    if (const auto value = oldest.value.lock()) {
      value->setComputed(nullptr);
    }
  }

  // May include freed values, which count until they are the oldest, or until more than about half may have been freed.
  std::deque<Entry> entries_;
  std::size_t nbytes_ = 0;
  std::size_t alive_ = 0;
};

ComputedCache& computedCache() {
  static auto* const all = new ComputedCache;  // leaked: values may be freed when the process ends
  return *all;
}

bool mayKeep(const StorageValue& value) {
  return value.nbytes() <= kMostBytes;
}

void keep(const StorageValue& value, c10::Storage storage) {
  const std::size_t nbytes = storage.nbytes();
  value.setComputed(std::make_shared<StorageValue>(std::move(storage)));
  computedCache().add(value, nbytes);
}

// ---- Values of real tensors ----

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

IsUnchanged watch(const Tensor& tensor) {
  return [tensor, digest = digestOf(tensor)] { return digestOf(tensor) == digest; };
}

}  // namespace

void registerKeptValues() {
  hooks().computed_values.mayKeep = &mayKeep;
  hooks().computed_values.keep = &keep;
  hooks().external_values.copyOf = [](const Tensor& bytes, std::size_t offset) {
    return sharedCopies().of(bytes, offset);
  };
  hooks().external_values.watch = &watch;
}

}  // namespace torchext
