#pragma once

// NOTE [Checking hits]
//
// The cache assumes that a key contains everything that results depend on. Tests try to falsify this: while hits are
// checked, a fraction of them is recomputed from scratch. An error is raised if the results differ.

#include <cstdint>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

// Sets the fraction of hits to check on all threads, from 0 (none) to 1 (all), and returns the previous fraction. The
// initial value is that of the environment variable TORCHEXT_CHECK_CACHE, or 0.
TORCHEXT_API double checkHits(double fraction);

// Returns the number of failed checks since the last call, including those whose error the program caught.
TORCHEXT_API std::uint64_t takeWrongHits() noexcept;

// Returns true if the next hit on this thread must be checked.
bool isHitChecked();

// Makes `isHitChecked()` return true the next time.
void checkNextHit() noexcept;

// Raises an error unless `recompute()` returns `remembered`, the description of the cached results of `op`. An error
// that `recompute()` raises counts as a difference, except for an interrupt, which is passed on.
void checkHit(const c10::OperatorHandle& op, const std::string& remembered, c10::function_ref<std::string()> recompute);

}  // namespace torchext
