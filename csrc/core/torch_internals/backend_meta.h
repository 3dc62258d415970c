#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// A TensorImpl can hold one backend object, a BackendMeta, which PyTorch's backends leave empty. Copies of the
// TensorImpl without its data, as by `detach()` and `.data`, keep that object. The marks of tensors rely on this.

// Returns true if copies of a TensorImpl keep that object.
bool testBackendMeta(bool is_broken);

}  // namespace torchext
