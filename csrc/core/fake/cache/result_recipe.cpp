#include "result_recipe.h"

#include <algorithm>
#include <iterator>
#include <typeinfo>
#include <utility>

#include "../../../libraries/support/locks.h"
#include "../../../libraries/support/stack_utils.h"
#include "../calls/errors.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

using c10::Storage;

namespace {

// Throws a copy of `error`, because its catcher may add context to it, on any thread. Unknown types are thrown as
// c10::Error.
template <typename First, typename... Others>
[[noreturn]] void throwCopyOf(const c10::Error& error) {
  if (typeid(error) == typeid(First)) {
    throw First{static_cast<const First&>(error)};
  }
  if constexpr (sizeof...(Others) == 0) {
    throw c10::Error{error};
  } else {
    throwCopyOf<Others...>(error);
  }
}

}  // namespace

// Makes results by their recipes.
class RecipeMaker {
 public:
  RecipeMaker(CallTensors arguments, const ResultRecipe& recipe) : arguments_{arguments} {
    for (const auto& storage : recipe.storages_) {
      storages_.push_back(storage.given ? storage.given
                                        : makeFakeStorage(storage.nbytes, storage.device, storage.is_pinned));
    }
  }

  using TensorRecipe = ResultRecipe::TensorRecipe;

  IValue make(const ResultRecipe::ValueRecipe& recipe) const {
    if (recipe.is_list) {
      c10::List<Tensor> tensors;
      tensors.reserve(recipe.tensors.size());
      for (const TensorRecipe& tensor : recipe.tensors) {
        tensors.push_back(makeTensor(tensor));
      }
      return tensors;
    }
    if (!recipe.other.isNone()) {
      auto next = recipe.tensors.begin();
      return mapTensors(recipe.other, [&](const Tensor& /*substitute*/) { return makeTensor(*next++); });
    }
    return recipe.tensors.empty() ? IValue{} : IValue{makeTensor(recipe.tensors.front())};
  }

  Tensor makeTensor(const TensorRecipe& recipe) const {
    switch (recipe.source) {
      case TensorRecipe::Source::kUndefined:
        return {};
      case TensorRecipe::Source::kArgument:
        return *arguments_[recipe.number];
      case TensorRecipe::Source::kViewOfArgument:
        return makeFakeView(*arguments_[recipe.number], *recipe.form);
      case TensorRecipe::Source::kOnArgument:
        return makeFakeTensor(Storage{arguments_[recipe.number]->storage()}, *recipe.form);
      case TensorRecipe::Source::kNewStorage:
        return makeFakeTensor(storages_[recipe.number], *recipe.form);
    }
    return {};
  }

  // An argument that is moved to a real storage becomes real, and that storage keeps its size.
  void change(const ResultRecipe::Changed& changed) const {
    c10::TensorImpl& impl = *arguments_[changed.number]->unsafeGetTensorImpl();
    if (changed.moved_to) {
      FakeTensorImpl::moveTo(impl, storages_[*changed.moved_to]);
    }
    if (isFakeStorage(impl.storage())) {
      FakeTensorImpl::resizeLike(impl, *changed.form, changed.nbytes);
    } else {
      FakeTensorImpl::copyGeometry(impl, *changed.form);
    }
  }

 private:
  const CallTensors arguments_;
  c10::SmallVector<Storage, 4> storages_;
};

ResultRecipe::ResultRecipe(const c10::OperatorHandle& op) : is_repeatable_{hasPureKernels(op)} {
  if (is_repeatable_) {
    kernels_ = kernelsOf(op);
  }
}

std::shared_ptr<ResultRecipe> ResultRecipe::refusing(const c10::OperatorHandle& op, std::exception_ptr refusal) {
  auto recipe = std::make_shared<ResultRecipe>(op);
  recipe->refusal_ = std::move(refusal);
  return recipe;
}

bool ResultRecipe::canBeMade(CallTensors arguments) const {
  return std::all_of(changed_.begin(), changed_.end(), [&](const Changed& changed) {
    return arguments[changed.number]->unsafeGetTensorImpl()->allow_tensor_metadata_change();
  });
}

Tensor ResultRecipe::makeOne(CallTensors arguments) const {
  return RecipeMaker{arguments, *this}.makeTensor(values_.front().tensors.front());
}

void ResultRecipe::changeArguments(CallTensors arguments) const {
  if (!changed_.empty()) {
    const RecipeMaker maker{arguments, *this};
    std::for_each(changed_.begin(), changed_.end(), [&maker](const Changed& changed) { maker.change(changed); });
  }
}

Results ResultRecipe::make(CallTensors arguments) const {
  if (refusal_) {
    try {
      std::rethrow_exception(refusal_);
    } catch (const c10::Error& error) {
      throwCopyOf<c10::IndexError, c10::ValueError, c10::TypeError, c10::NotImplementedError, c10::LinAlgError,
                  RefusedOnCudaError>(error);
    }
  }
  const RecipeMaker maker{arguments, *this};
  std::for_each(changed_.begin(), changed_.end(), [&maker](const Changed& changed) { maker.change(changed); });
  Results results;
  for (const ValueRecipe& value : values_) {
    results.push_back(maker.make(value));
  }
  return results;
}

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
  while (entries_.size() > kMaxEntries || num_words_ > kMaxWords) {
    const auto oldest = std::prev(entries_.end());
    index_.erase(View{oldest->words, oldest->hash});
    num_words_ -= oldest->words.size();
    forgotten.splice(forgotten.end(), entries_, oldest);
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

MetadataCache& metadataCache() {
  // Leaked: threads may run operators until the process ends, and kernels written in Python cannot be freed after the
  // interpreter has been finalized.
  static auto* cache = new MetadataCache;
  return *cache;
}

}  // namespace torchext
