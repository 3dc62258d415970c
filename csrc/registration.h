#pragma once

#include <torchext/macros.h>

namespace torchext {

// Runs the self-tests of torch_internals/ and makes forking safe, once per process. Raises if PyTorch does not behave
// as torch_internals/ assumes. Called before the first dispatch key is taken; it may be called earlier, as the bindings
// do, which want an error when they are imported. Takes no key itself: takeFakeKeys(), enterDeferredInit() and
// takeMarksKey() do so when one is needed.
TORCHEXT_API void setUp();

// Returns the release of PyTorch that this library was compiled against, as in "2.13.0". Another build of torchext in
// the same folder replaces the library, but not the bindings for another version of Python.
TORCHEXT_API const char* builtForTorch() noexcept;

}  // namespace torchext
