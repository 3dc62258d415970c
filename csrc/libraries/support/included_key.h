#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

// While it lives, this thread includes a dispatch key, or does not include it. PyTorch's `IncludeDispatchKeyGuard`
// restores all keys, which ends guards that began later and outlive it: NOTE [Guards and blocks]. This guard changes
// only its own key.
class IncludedKey {
 public:
  explicit IncludedKey(c10::DispatchKey key, bool is_included = true)
      : key_{key}, was_included_{c10::impl::tls_is_dispatch_key_included(key)} {
    c10::impl::tls_set_dispatch_key_included(key_, is_included);
  }
  C10_DISABLE_COPY_AND_ASSIGN(IncludedKey);
  ~IncludedKey() {
    c10::impl::tls_set_dispatch_key_included(key_, was_included_);
  }

 private:
  c10::DispatchKey key_;
  bool was_included_;
};

}  // namespace torchext
