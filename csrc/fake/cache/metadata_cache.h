#pragma once

// Many Meta kernels are Python functions that take a hundred times as long as the real kernel does on a small tensor. A
// program asks the same questions again and again, so the answers are kept: NOTE [What the metadata of results depend
// on].

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "call_key.h"
#include "result_recipe.h"

namespace torchext {

struct CacheInfo {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  // Of the misses, the calls that cannot be remembered, because they change the metadata of their arguments, say.
  std::uint64_t uncacheable = 0;
  std::size_t size = 0;
  std::size_t capacity = 0;
};

// Recipes by calls, for all threads. When there are too many, those that were not asked for longest go.
class MetadataCache {
 public:
  // The recipe of the call that `key` describes, or null.
  std::shared_ptr<const ResultRecipe> find(const CallKey& key);

  // A `recipe` that is null counts as a call that cannot be remembered.
  void remember(const CallKey& key, std::shared_ptr<const ResultRecipe> recipe);

  CacheInfo info() const;

  // Forgets all recipes and counts.
  void clear();

  // Held while the process forks, as `lockStorages()`.
  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  struct Entry {
    std::vector<std::uint64_t> words;
    std::size_t hash;
    std::shared_ptr<const ResultRecipe> recipe;
  };
  using Entries = std::list<Entry>;

  // What the map is searched by: the words of a key, or of an entry that holds them.
  struct View {
    c10::ArrayRef<std::uint64_t> words;
    std::size_t hash;

    bool operator==(const View& other) const {
      return hash == other.hash && words == other.words;
    }
  };
  struct HashOfView {
    std::size_t operator()(const View& view) const noexcept {
      return view.hash;
    }
  };

  bool isTooLarge() const noexcept;
  Entries takeOldest();

  mutable std::mutex mutex_;
  Entries entries_;  // the one that was asked for last comes first
  std::unordered_map<View, Entries::iterator, HashOfView> index_;
  std::size_t num_words_ = 0;
  CacheInfo info_;
};

MetadataCache& metadataCache();

}  // namespace torchext
