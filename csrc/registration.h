#pragma once

#include "support/macros.h"

namespace torchext {

// Runs the self-tests of torch_internals/, connects the parts of fakes, and makes forking safe, once per process.
// Raises if PyTorch does not behave as torch_internals/ assumes. Takes no dispatch key: takeFakeKeys(),
// enterDeferredInit() and takeMarksKey() do so when a key is needed.
TORCHEXT_API void setUp();

}  // namespace torchext
