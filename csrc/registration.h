#pragma once

#include "support/macros.h"

namespace torchext {

// Makes sure that PyTorch is what torch_internals/ takes it for, and that the process may fork. Does it once per
// process. Raises when PyTorch is not. No dispatch key is taken before it is needed: takeFakeKeys(),
// enterDeferredInit() and takeMarksKey() do it.
TORCHEXT_API void setUp();

}  // namespace torchext
