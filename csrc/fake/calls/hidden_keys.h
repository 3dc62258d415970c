#pragma once

#include <c10/core/DispatchKeySet.h>

#include "../../marks/tensor_marks.h"

namespace torchext {

// Keys to exclude while something runs for our own purposes (a Meta kernel, a look at values, a replay). The
// allocations, views and writes that it makes are not the user's: they must reach neither autograd, nor a mode, nor our
// own handlers.
inline const c10::DispatchKeySet kHiddenFromUsers =
    c10::autograd_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, kMarksKey});

}  // namespace torchext
