#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

// Keys to exclude during internal calls: a Meta kernel, a read of values, a replay. The allocations, views and writes
// of such calls are not the user's: they must not reach autograd, a mode or our own handlers.
inline const c10::DispatchKeySet kHiddenFromUsers =
    c10::autograd_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                         c10::DispatchKey::TESTING_ONLY_GenericMode});

// While it lives, calls on real tensors are hidden.
struct HiddenCalls {
  const c10::impl::ExcludeDispatchKeyGuard keys{kHiddenFromUsers};
};

// Keys to exclude while a fake implementation runs (NOTE [Fake implementations]): all of these, except that our handler
// answers its calls, and that it may make tensors of subclasses.
inline const c10::DispatchKeySet kHiddenFromImplementations =
    kHiddenFromUsers - c10::DispatchKeySet({c10::DispatchKey::Fake, c10::DispatchKey::Python});

}  // namespace torchext
