#pragma once

// NOTE [Sparse fakes]
//
// A sparse tensor has no storage. It has members, which are strided tensors: indices and values. A sparse tensor is
// fake if its values are fake. It is a PyTorch object (SparseTensorImpl, SparseCsrTensorImpl) with the keys of a
// real one and `Fake`, and all of its members are fake. So `_nnz()`, `sparse_dim()`, `is_coalesced()` and
// others behave as on a real tensor.
//
// PyTorch's sparse kernels mostly call operators on the members. On a sparse fake, these operators reach the handler of
// `Fake`, so the kernels compute the metadata of the real results: see sparse_call.cpp. Intermediate sparse tensors are
// fake only because their members are; the results of a call also get the key.

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>
#include <torchext/macros.h>

namespace torchext {

// Adds the handler of calls on sparse tensors to the hooks (sparse_call.cpp).
void registerSparseCalls();

// Returns true for a sparse tensor, real or fake. Returns false for a Python subclass that only claims a sparse layout.
bool isSparse(const at::TensorBase& tensor) noexcept;

// Returns true for a sparse tensor whose values are fake, with or without the `Fake` key.
bool isSparseFake(const at::TensorBase& tensor);

// Returns the strided members of a sparse tensor: for COO, indices and values; otherwise, compressed indices, plain
// indices and values.
std::vector<at::Tensor> sparseMembersOf(const at::Tensor& sparse);

// Returns a fake like the sparse tensor `like` with the given members: as many fakes as it has. The result has the
// dtype and device of its values, carries the `Fake` key, and shares the storages of the members. Calls neither the
// dispatcher nor a mode.
at::Tensor makeSparseFake(const at::Tensor& like, at::ArrayRef<at::Tensor> members);

// The same with checks of the arguments. `like` may be real.
TORCHEXT_API at::Tensor sparseFakeOf(const at::Tensor& like, at::ArrayRef<at::Tensor> members);

}  // namespace torchext
