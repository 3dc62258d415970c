#pragma once

#include "macros.h"

namespace torchext {

// Puts our fallbacks on the `Fake` and `DeferredInit` keys, once per process. Raises, and registers nothing, when
// another library has taken one of them. Two more keys are taken when they are first needed: takeCompositesKey() and
// takeMarksKey().
TORCHEXT_API void registerDispatchKeys();

}  // namespace torchext
