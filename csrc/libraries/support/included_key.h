#pragma once

#include <c10/core/DispatchKeySet.h>
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

// While it lives, operators that this thread redispatches to `kCpu` run their kernels, and so do the operators that
// these call: no autograd, no modes, and none of our keys. For memory that no other tensor shows.
class KernelsOnly {
 public:
  static constexpr c10::DispatchKeySet kCpu{c10::DispatchKey::CPU};

 private:
  // Factories reach their kernels through this key.
  static constexpr c10::DispatchKeySet kSelect{c10::DispatchKey::BackendSelect};

  c10::impl::ForceDispatchKeyGuard guard_{
      kSelect, c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKey::Dense) - kSelect};
};

}  // namespace torchext
