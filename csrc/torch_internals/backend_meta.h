#pragma once

#include <c10/core/TensorImpl.h>

namespace torchext {

// A TensorImpl has room for one object of the backend that it belongs to, a BackendMeta, which the backends of PyTorch
// itself leave empty. What hangs there goes along when the TensorImpl is copied without its data, as by `detach()` and
// `.data`; that is all that the marks of tensors are about.

// Returns true if copies of a TensorImpl take along what hangs there.
bool testBackendMeta(bool is_broken);

}  // namespace torchext
