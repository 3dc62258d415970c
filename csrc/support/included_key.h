#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

// While it lives, this thread includes a dispatch key. PyTorch's `IncludeDispatchKeyGuard` puts back all keys that it
// has found, which takes those of guards away that began meanwhile and go on: NOTE [Guards and blocks]. This one
// changes its own key only.
class IncludedKey {
 public:
  explicit IncludedKey(c10::DispatchKey key) : key_{key}, was_included_{c10::impl::tls_is_dispatch_key_included(key)} {
    c10::impl::tls_set_dispatch_key_included(key_, true);
  }
  IncludedKey(const IncludedKey&) = delete;
  IncludedKey& operator=(const IncludedKey&) = delete;
  IncludedKey(IncludedKey&&) = delete;
  IncludedKey& operator=(IncludedKey&&) = delete;
  ~IncludedKey() {
    c10::impl::tls_set_dispatch_key_included(key_, was_included_);
  }

 private:
  c10::DispatchKey key_;
  bool was_included_;
};

}  // namespace torchext
