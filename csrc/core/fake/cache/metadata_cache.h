#pragma once

// Many Meta kernels are Python functions that take 100 times as long as the real kernel on a small tensor. Programs
// repeat the same calls, so the metadata of their results are cached: NOTE [Inputs of the metadata of results].

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include <c10/util/flat_hash_map.h>
#include <torchext/macros.h>

#include "call_key.h"
#include "result_recipe.h"

namespace torchext {

struct CacheInfo {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  // Misses that cannot be cached, for example because the call moves an argument to another storage.
  std::uint64_t uncacheable = 0;
  std::size_t size = 0;
  std::size_t capacity = 0;
};

// Maps calls to recipes for all threads, and evicts the least recently used recipes.
class MetadataCache {
 public:
  // Returns the recipe of the call that `key` describes, or null without one, or if `is_wanted` returns false for it.
  using Wanted = bool (*)(const ResultRecipe& recipe);
  std::shared_ptr<const ResultRecipe> find(
      const CallKey& key, Wanted is_wanted = [](const ResultRecipe&) { return true; });

  // Adds a recipe. A null recipe only counts as uncacheable.
  void remember(const CallKey& key, std::shared_ptr<const ResultRecipe> recipe);

  TORCHEXT_API CacheInfo info() const;

  // Removes all recipes and resets all counts.
  TORCHEXT_API void clear();

 private:
  struct Entry {
    std::vector<std::uint64_t> words;
    std::size_t hash;
    std::shared_ptr<const ResultRecipe> recipe;
  };
  using Entries = std::list<Entry>;

  // The key type of the map: refers to the words of a CallKey or of an entry.
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

  Entries entries_;  // the most recently used first
  ska::flat_hash_map<View, Entries::iterator, HashOfView> index_;
  std::size_t num_words_ = 0;
  CacheInfo info_;
};

TORCHEXT_API MetadataCache& metadataCache();

}  // namespace torchext
