#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

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
