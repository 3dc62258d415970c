#pragma once

// NOTE [Sparse fakes]
//
// A sparse tensor has no storage; it has members, which are strided tensors: indices and values. A sparse tensor is
// fake when its values are. It is an object of PyTorch's own class (SparseTensorImpl, SparseCsrTensorImpl), with the
// keys of a real one and `Fake`, and all of its members are fake. So `_nnz()`, `sparse_dim()`, `is_coalesced()` and the
// rest behave as on a real one.
//
// PyTorch's sparse kernels mostly call operators on the members. Called on a sparse fake, they compute the metadata of
// what they would compute on a real one, because those operators reach the handler of `Fake`: see sparse_call.h.
// Intermediate sparse tensors are fake only because their members are; the results of a call get the key.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>

namespace torchext {

// Returns true for COO and the four compressed layouts.
constexpr bool isSparseLayout(c10::Layout layout) noexcept {
  return layout == c10::kSparse || layout == c10::kSparseCsr || layout == c10::kSparseCsc ||
         layout == c10::kSparseBsr || layout == c10::kSparseBsc;
}

// Returns the layout's name in Python, such as `torch.sparse_coo`.
std::string nameOf(c10::Layout layout);

// Returns true for a sparse tensor, fake or not. False for a Python subclass that only claims a sparse layout.
bool isSparse(const at::TensorBase& tensor) noexcept;

// Returns true for a sparse tensor whose values are fake, whether it carries the `Fake` key or not.
bool isSparseFake(const at::TensorBase& tensor);

// Gives the `Fake` key to a sparse tensor whose values are fake. Does nothing to others.
void giveFakeKey(const at::Tensor& tensor);

// Returns the strided tensors that make up a sparse one: for COO, indices and values; for the others, compressed
// indices, plain indices and values.
std::vector<at::Tensor> sparseMembersOf(const at::Tensor& sparse);

// Does what `LayoutHandler::fakeOf()` says.
at::Tensor makeSparseFake(const at::Tensor& like, at::ArrayRef<at::Tensor> members);

}  // namespace torchext
