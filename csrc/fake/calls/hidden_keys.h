#pragma once

#include <c10/core/DispatchKeySet.h>

#include "../../marks/tensor_marks.h"

namespace torchext {

// What runs for our own purposes (a Meta kernel, a look at values, a replay) allocates, views and writes tensors. None
// of that is the user's: it must reach neither autograd, nor a mode, nor our own handlers.
inline const c10::DispatchKeySet kHiddenFromUsers =
    c10::autograd_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, kMarksKey});

}  // namespace torchext
