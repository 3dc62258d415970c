#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// PyTorch has no function that gives a tensor keys, or takes them away. A class may name a protected member of its base
// in any object of that base ([class.protected] is about the class that is named).
class OpenTensorImpl : public c10::TensorImpl {
 public:
  static c10::DispatchKeySet& keysOf(c10::TensorImpl& impl) {
    return impl.*(&OpenTensorImpl::key_set_);
  }
};

// Returns true if keys that are given so are those that the tensor has.
bool testTensorKeys(bool is_broken);

}  // namespace torchext
