#pragma once

// What computing a recorded value takes, told without computing anything.

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

struct ReplayNeeds {
  // The most memory that is held at one time, in bytes, with the value itself. What an operator allocates inside of its
  // kernel is estimated: as much as its arguments, if it is neither elementwise nor a random fill.
  std::size_t peak = 0;
  // What all operators write, in bytes, which is about proportional to the time.
  std::size_t written = 0;
};

// Of `evaluate(deferred)`. Raises ValueError if `deferred` is not deferred.
TORCHEXT_API ReplayNeeds needsOf(const at::Tensor& deferred);

}  // namespace torchext
