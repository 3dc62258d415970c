#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// PyTorch has no function that adds or removes dispatch keys of a tensor. A derived class may name a protected member
// of its base, and then access it on any object of the base ([class.protected] restricts only the named class).
class OpenTensorImpl : public c10::TensorImpl {
 public:
  static c10::DispatchKeySet& keysOf(c10::TensorImpl& impl) {
    return impl.*(&OpenTensorImpl::key_set_);
  }
};

}  // namespace torchext
