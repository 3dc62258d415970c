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
#include <deque>
#include <memory>
#include <numeric>
#include <utility>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/hooks/hooks.h"
#include "../support/registrations.h"

namespace torchext {

namespace {

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

}  // namespace

void registerComputedValues() {
  hooks().computed_values.mayKeep = &mayKeep;
  hooks().computed_values.keep = &keep;
}

}  // namespace torchext
