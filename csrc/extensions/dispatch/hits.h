#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "../../core/fake/cache/call_key.h"
#include "../../core/fake/cache/result_recipe.h"

namespace torchext {

// Returns true if the results of `op` alone are not enough on this thread, for example because calls are recorded.
bool callsNeedHandler(const c10::OperatorHandle& op);

// Returns the recipe of an unboxed call that the cache remembers: NOTE [Unboxed calls]. Returns null for calls whose
// tensors need more than their recipe, or boxed arguments. The caller has checked `callsNeedHandler()`. `gives_values`:
// whether the caller gives the results the values that a factory makes.
std::shared_ptr<const ResultRecipe> recipeOfHit(const CallKey& key, bool gives_values);

// Returns true if an alias of `self` can be made without a recipe, which would only copy the geometry. The caller has
// checked `callsNeedHandler()`.
bool canBeAliased(const at::Tensor& self);

}  // namespace torchext
