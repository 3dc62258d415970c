#include "hits.h"

#include <algorithm>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/cache/metadata_cache.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../../core/hooks/hooks.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::OperatorHandle;

namespace {

bool needsHandler(const Tensor& fake) {
  return mayHaveProvenance(fake) && (hooks().recorder.concerns || hooks().values.has(fake));
}

// Returns true if a call of `tensors` needs its boxed arguments. `num_fakes` of them are fake.
bool needsHandler(c10::ArrayRef<const Tensor*> tensors, std::size_t num_fakes) {
  if (num_fakes == 0 && !isFakeMode()) {
    return true;
  }
  if (num_fakes == tensors.size()) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* fake) { return needsHandler(*fake); });
  }
  // Stale keys are dropped by the handler.
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
    return isFake(*tensor) ? needsHandler(*tensor)
                           : tensor->key_set().has(DispatchKey::Fake) || hooks().values.mayBeChecked(*tensor);
  });
}

}  // namespace

bool callsNeedHandler(const OperatorHandle& op) {
  const MemoryCounter* const counter = memoryCounter();
  return isRecording() || isInFakeImplementation() || hooks().values.areAssumed() ||
         (counter != nullptr && counter->observes(op)) ||
         c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit);
}

std::shared_ptr<const ResultRecipe> recipeOfHit(const CallKey& key, bool gives_values) {
  if (!key.isComplete() || needsHandler(key.tensors(), key.numFakes())) {
    return nullptr;
  }
  const auto has_results = [](const ResultRecipe& found) { return !found.refuses(); };
  const auto has_only_results = [](const ResultRecipe& found) { return !found.refuses() && !found.makesValues(); };
  auto recipe = metadataCache().find(key, gives_values ? MetadataCache::Wanted{has_results} : has_only_results);
  return recipe != nullptr && recipe->canBeMade(key.tensors()) ? recipe : nullptr;
}

bool canBeAliased(const Tensor& self) {
  return isPlainFake(self) && !needsHandler(self);
}

}  // namespace torchext
