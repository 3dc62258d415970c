#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "cache/call_key.h"
#include "cache/result_recipe.h"
#include "storage/storage_memory.h"

namespace torchext {

// Returns true if factories on this thread make fakes.
bool isFakeMode();

// Returns true if the results of `op` alone are not enough on this thread, for example because calls are recorded.
bool callsNeedHandler(const c10::OperatorHandle& op);

// Returns the recipe of an unboxed call that the cache remembers: NOTE [Unboxed calls]. Returns null for calls whose
// tensors need more than their recipe, or boxed arguments. The caller has checked `callsNeedHandler()`. `gives_values`:
// whether the caller gives the results the values that a factory makes.
std::shared_ptr<const ResultRecipe> recipeOfHit(const CallKey& key, bool gives_values);

// Returns true if an alias of `self` can be made without a recipe, which would only copy the geometry. The caller has
// checked `callsNeedHandler()`.
bool canBeAliased(const at::Tensor& self);

// Counts the memory of a call: what its kernel allocates, if `has_new` or `scratch`, and what the counter derives from
// its arguments. Storages that deferred_init records, or a fake implementation makes, are not counted.
void countCall(
    const c10::OperatorHandle& op, Arguments arguments, const KernelScratch* scratch, Arguments results, bool has_new);

// Counts the memory that the kernel of a call allocates: `scratch`, if any, and its results, which `results` returns.
template <typename MakeResults>
void countHit(const c10::OperatorHandle& op, const KernelScratch* scratch, const MakeResults& results) {
  if (takeUncounted() || scratch != nullptr) {
    memoryCounter()->runKernel(op, scratch, results());
  }
}

}  // namespace torchext
