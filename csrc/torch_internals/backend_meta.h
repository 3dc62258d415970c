#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// A TensorImpl has room for one object of its backend, a BackendMeta, which PyTorch's own backends leave empty. That
// object goes along when the TensorImpl is copied without its data, as by `detach()` and `.data`. The marks of tensors
// rely on this.

// Returns true if copies of a TensorImpl keep that object.
bool testBackendMeta(bool is_broken);

}  // namespace torchext
