#pragma once

#include <torchext/macros.h>

namespace torchext {

// Runs the self-tests of torch_internals/ and makes forking safe, once per process. Raises if PyTorch does not behave
// as torch_internals/ assumes. Called before the first dispatch key is taken; it may be called earlier, as the bindings
// do, which want an error when they are imported. Takes no key itself: takeFakeKeys(), enterDeferredInit() and
// takeMarksKey() do so when one is needed.
TORCHEXT_API void setUp();

}  // namespace torchext
