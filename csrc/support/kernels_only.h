#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

// While it lives, operators that this thread redispatches to `kCpu` run their kernels, and so does what these call: no
// autograd, no modes, and no keys of ours. For memory that nobody knows as a tensor.
class KernelsOnly {
 public:
  static constexpr c10::DispatchKeySet kCpu{c10::DispatchKey::CPU};

 private:
  // Factories are led to their kernels by this key.
  static constexpr c10::DispatchKeySet kSelect{c10::DispatchKey::BackendSelect};

  c10::impl::ForceDispatchKeyGuard guard_{
      kSelect, c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKey::Dense) - kSelect};
};

}  // namespace torchext
