#pragma once

#include <torchext/macros.h>

namespace torchext {

// Runs the self-tests of pieces that rely on details of PyTorch and makes forking safe, once per process. Raises if
// PyTorch does not behave as torch_internals/ assumes. Called before the first dispatch key is taken. The bindings call
// it earlier, to raise errors on import. Takes no key: takeFakeKeys(), DeferredInitGuard and extensions take keys on
// demand.
TORCHEXT_API void setUp();

// Returns the PyTorch release that this library was compiled against, such as "2.13.0". Another build of torchext in
// the same directory replaces the library, but not the bindings for another version of Python.
TORCHEXT_API const char* builtForTorch() noexcept;

}  // namespace torchext
