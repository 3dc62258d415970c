#pragma once

#include <torchext/deferred_init.h>
#include <torchext/macros.h>

namespace torchext {

// For languages without guards: NOTE [Guards and blocks]. Leaving raises if no block is open on this thread.
TORCHEXT_API void enterDeferredInit();
TORCHEXT_API void leaveDeferredInit();

}  // namespace torchext
