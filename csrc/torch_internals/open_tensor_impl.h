#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// PyTorch has no function that adds dispatch keys to a tensor, or removes them. A derived class may name a protected
// member of its base, and then use it on any object of that base ([class.protected] restricts only the class that is
// named).
class OpenTensorImpl : public c10::TensorImpl {
 public:
  static c10::DispatchKeySet& keysOf(c10::TensorImpl& impl) {
    return impl.*(&OpenTensorImpl::key_set_);
  }
};

// Returns true if a tensor has the keys that were set in this way.
bool testTensorKeys(bool is_broken);

}  // namespace torchext
