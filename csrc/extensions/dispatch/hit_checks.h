#pragma once

// NOTE [Checking hits]
//
// The cache assumes that a key contains everything that results depend on. Tests try to falsify this: while hits are
// checked, a fraction of them is recomputed from scratch. An error is raised if the results differ.

#include <cstdint>

#include <torchext/macros.h>

namespace torchext {

// Sets the fraction of hits to check on all threads, from 0 (none) to 1 (all), and returns the previous fraction. The
// initial value is that of the environment variable TORCHEXT_CHECK_CACHE, or 0.
TORCHEXT_API double checkHits(double fraction);

// Returns the number of failed checks since the last call, including those whose error the program caught.
TORCHEXT_API std::uint64_t takeWrongHits() noexcept;

// Makes the next hit on this thread due for a check.
void checkNextHit() noexcept;

// Answers the hook `HitChecks`. Call while the library is loaded.
void registerHitChecks();

}  // namespace torchext
