#include "metadata_cache.h"

#include <iterator>
#include <utility>

#include "../../../libraries/support/locks.h"

namespace torchext {

namespace {

constexpr std::size_t kMaxEntries = 16384;
// 32 MiB: calls of foreach operators on all parameters of a model have long keys.
constexpr std::size_t kMaxWords = std::size_t{1} << 22U;

}  // namespace

std::shared_ptr<const ResultRecipe> MetadataCache::find(const CallKey& key, Wanted is_wanted) {
  if (!key.isComplete()) {
    return nullptr;
  }
  const View view{key.words(), key.hash()};
  const Locked lock{LockRank::kMetadataCache};
  const auto found = index_.find(view);
  if (found == index_.end() || !is_wanted(*found->second->recipe)) {
    return nullptr;
  }
  ++info_.hits;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->recipe;
}

void MetadataCache::remember(const CallKey& key, std::shared_ptr<const ResultRecipe> recipe) {
  Entries forgotten;  // freed after unlocking: freeing a kernel written in Python acquires the GIL
  Entries added;      // copied before locking: up to 32 MiB
  if (recipe != nullptr && key.words().size() <= kMaxWords) {
    added.push_front({{key.words().begin(), key.words().end()}, key.hash(), std::move(recipe)});
  }
  const Locked lock{LockRank::kMetadataCache};
  ++info_.misses;
  if (added.empty()) {
    ++info_.uncacheable;
    return;
  }
  const View view{key.words(), key.hash()};
  if (index_.count(view) != 0) {
    return;  // another thread has added it
  }
  entries_.splice(entries_.begin(), added);
  index_.emplace(View{entries_.front().words, view.hash}, entries_.begin());
  num_words_ += key.words().size();
  while (isTooLarge()) {
    forgotten.splice(forgotten.end(), takeOldest());
  }
}

CacheInfo MetadataCache::info() const {
  const Locked lock{LockRank::kMetadataCache};
  CacheInfo info = info_;
  info.size = entries_.size();
  info.capacity = kMaxEntries;
  return info;
}

void MetadataCache::clear() {
  Entries forgotten;
  const Locked lock{LockRank::kMetadataCache};
  index_.clear();
  forgotten.swap(entries_);
  num_words_ = 0;
  info_ = {};
}

bool MetadataCache::isTooLarge() const noexcept {
  return entries_.size() > kMaxEntries || num_words_ > kMaxWords;
}

MetadataCache::Entries MetadataCache::takeOldest() {
  Entries taken;
  const auto oldest = std::prev(entries_.end());
  index_.erase(View{oldest->words, oldest->hash});
  num_words_ -= oldest->words.size();
  taken.splice(taken.begin(), entries_, oldest);
  return taken;
}

MetadataCache& metadataCache() {
  // Leaked: threads may run operators until the process ends, and kernels written in Python cannot be freed after the
  // interpreter has been finalized.
  static auto* cache = new MetadataCache;
  return *cache;
}

}  // namespace torchext
