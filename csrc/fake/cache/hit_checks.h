#pragma once

// NOTE [Checking hits]
//
// That a key has all that results depend on is a claim about all of PyTorch, so tests try to falsify it. While hits are
// checked, the results of a part of the calls that are found in the cache are computed again from scratch, and an error
// is raised if they differ from what the cache returns.

#include <cstdint>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

// Has `fraction` of the hits checked from now on, on all threads: 0 for none, 1 for all. Returns the fraction before.
// The initial fraction is that of the environment variable TORCHEXT_CHECK_CACHE, or 0.
TORCHEXT_API double checkHits(double fraction);

// Returns how many hits have differed since the last call. Programs that catch errors do not notice the error.
TORCHEXT_API std::uint64_t takeWrongHits() noexcept;

// Returns true if the next hit on this thread is to be checked.
bool isHitChecked();

// Raises an error if `recompute`, which returns a description of the results of a call of `op` or raises, does not
// return `remembered`.
void checkHit(const c10::OperatorHandle& op, const std::string& remembered, c10::function_ref<std::string()> recompute);

}  // namespace torchext
