#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"
#include "call_key.h"

namespace torchext {

using Results = c10::SmallVector<c10::IValue, 4>;

// The effects of a call on fakes: its results and the new metadata of its arguments, or its refusal. Made by a
// RecipeBuilder, without touching a fake, and applied by `make()`: after a miss to the tensors of the call itself, and
// after a hit of the cache to other tensors with the same metadata.
class ResultRecipe {
 public:
  // Without results, which a RecipeBuilder adds.
  explicit ResultRecipe(const c10::OperatorHandle& op);

  // Returns the recipe of a call of `op` that real tensors refuse.
  static std::shared_ptr<ResultRecipe> refusing(const c10::OperatorHandle& op, std::exception_ptr refusal);

  // Returns true if the recipe is valid for all calls with an equal key. PyTorch warns about some changes of arguments
  // each time, and kernels of other libraries may depend on anything (`hasPureKernels()`).
  bool isRepeatable() const noexcept {
    return is_repeatable_;
  }

  // Adds facts that depend on the results. Call it before the cache has the recipe. `makes_values`: whether they may
  // have known values although the arguments have none. `scratch`: the temporary buffers of the kernel, or null.
  void complete(bool makes_values, std::shared_ptr<const KernelScratch> scratch) noexcept {
    makes_values_ = makes_values;
    scratch_ = std::move(scratch);
  }

  bool makesValues() const noexcept {
    return makes_values_;
  }

  bool refuses() const noexcept {
    return refusal_ != nullptr;
  }

  // Returns false if the recipe would resize a result of `detach()`, which must not be resized.
  bool canBeMade(CallTensors arguments) const;

  // Returns the results for `arguments` and changes these as the call did, or raises a copy of the refusal: c10::Error,
  // or one of its subclasses that kernels raise.
  Results make(CallTensors arguments) const;

  // Returns the only result of a call that returns a new tensor. The recipe must neither refuse nor resize.
  at::Tensor makeOne(CallTensors arguments) const;

  // Changes `arguments` as the call did. Enough for a repeatable call that returns only arguments.
  void changeArguments(CallTensors arguments) const;

  const KernelScratch* scratch() const noexcept {
    return scratch_.get();
  }

  // Returns true if `make()` changes arguments.
  bool changesArguments() const noexcept {
    return !changed_.empty();
  }

 private:
  friend class RecipeBuilder;
  friend class RecipeMaker;
  friend class RecipeText;  // for checks of hits, in an extension

  struct TensorRecipe {
    enum class Source : std::uint8_t { kUndefined, kArgument, kViewOfArgument, kOnArgument, kNewStorage };
    Source source = Source::kUndefined;
    // The index of the argument or of the new storage.
    std::size_t number = 0;
    // The geometry and dtype of a view or of a tensor on a new storage. Has no storage.
    c10::intrusive_ptr<c10::TensorImpl> form;
  };

  struct ValueRecipe {
    bool is_list = false;
    std::vector<TensorRecipe> tensors;
    // A value that is neither a tensor nor a list of tensors. If it contains tensors, `tensors` replace them.
    c10::IValue other;
  };

  // The metadata of an argument after the call.
  struct Changed {
    std::size_t number;
    c10::intrusive_ptr<c10::TensorImpl> form;
    std::size_t nbytes;
    std::optional<std::size_t> moved_to;  // the number of the storage, if the call moves the argument
  };

  // A new storage, or a given one that is used in its place.
  struct ListedStorage {
    std::size_t nbytes;
    c10::Device device;
    bool is_pinned;
    c10::Storage given;
  };

  // Kept alive so that their identities, which are part of the call's key, stay unique.
  CallKernels kernels_;
  std::vector<ValueRecipe> values_;
  std::vector<ListedStorage> storages_;
  std::vector<Changed> changed_;
  std::shared_ptr<const KernelScratch> scratch_;
  std::exception_ptr refusal_;
  bool makes_values_ = false;
  bool is_repeatable_;
};

// Many Meta kernels are Python functions that take 100 times as long as the real kernel on a small tensor. Programs
// repeat the same calls, so the metadata of their results are cached: NOTE [Inputs of the metadata of results].

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

  Entries entries_;  // the most recently used first
  ska::flat_hash_map<View, Entries::iterator, HashOfView> index_;
  std::size_t num_words_ = 0;
  CacheInfo info_;
};

TORCHEXT_API MetadataCache& metadataCache();

}  // namespace torchext
