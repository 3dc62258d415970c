#include "sparse_fakes.h"

#include <utility>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/device_index.h"

namespace torchext {

using at::SparseCsrTensorImpl;
using at::SparseTensorImpl;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// A Python subclass may claim a sparse layout but be a plain TensorImpl, so the keys alone do not decide. They are
// checked first because that is fast. `layout()` is not called because such a subclass may override it.
bool mayBeSparse(const at::TensorBase& tensor) noexcept {
  return tensor.key_set().has_any(DispatchKeySet({DispatchKey::Sparse, DispatchKey::SparseCsr}));
}

const SparseTensorImpl* asCoo(const at::TensorBase& tensor) noexcept {
  return dynamic_cast<const SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

const SparseCsrTensorImpl* asCompressed(const at::TensorBase& tensor) noexcept {
  return dynamic_cast<const SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Exists while a sparse fake is constructed. The constructors of both classes call `at::empty()` for the members, on
// the claimed device. These calls must not need that device, and must not reach a mode or handler.
struct MakingMembers {
  c10::impl::ExcludeDispatchKeyGuard exclude{c10::autograd_dispatch_keyset |
                                             DispatchKeySet({DispatchKey::DeferredInit, DispatchKey::ADInplaceOrView,
                                                             DispatchKey::Python, DispatchKey::PythonTLSSnapshot})};
  FakeFactoriesGuard include;
};

DispatchKeySet keysOf(const Tensor& like, const Tensor& values) {
  return DispatchKeySet{c10::computeDispatchKey(values.scalar_type(), like.layout(), values.device()),
                        DispatchKey::Fake};
}

Tensor makeCoo(const Tensor& like, const SparseTensorImpl& form, at::ArrayRef<Tensor> members) {
  const Tensor& values = members.back();
  const OnDevice on_device{values.device()};  // the constructor takes the current one
  auto impl = c10::make_intrusive<SparseTensorImpl>(keysOf(like, values), values.dtype());
  impl->raw_resize_(form.sparse_dim(), form.dense_dim(), form.sizes());
  impl->set_indices_and_values_unsafe(members.front(), values);
  impl->set_coalesced(form.coalesced());
  return Tensor{std::move(impl)};
}

Tensor makeCompressed(const Tensor& like, at::ArrayRef<Tensor> members) {
  const Tensor& values = members.back();
  auto impl =
      c10::make_intrusive<SparseCsrTensorImpl>(keysOf(like, values), values.device(), like.layout(), values.dtype());
  impl->set_member_tensors(members.front(), members[1], values, like.sizes());
  return Tensor{std::move(impl)};
}

}  // namespace

bool isSparse(const at::TensorBase& tensor) noexcept {
  return mayBeSparse(tensor) && (asCoo(tensor) != nullptr || asCompressed(tensor) != nullptr);
}

bool isSparseFake(const at::TensorBase& tensor) {
  if (!mayBeSparse(tensor)) {
    return false;
  }
  if (const auto* coo = asCoo(tensor)) {
    return isFake(coo->values());
  }
  const auto* compressed = asCompressed(tensor);
  return compressed != nullptr && isFake(compressed->values());
}

std::vector<Tensor> sparseMembersOf(const Tensor& sparse) {
  if (const auto* coo = asCoo(sparse)) {
    return {coo->indices(), coo->values()};
  }
  const auto& compressed = dynamic_cast<const SparseCsrTensorImpl&>(*sparse.unsafeGetTensorImpl());
  return {compressed.compressed_indices(), compressed.plain_indices(), compressed.values()};
}

Tensor makeSparseFake(const Tensor& like, at::ArrayRef<Tensor> members) {
  const MakingMembers making_members;
  const auto* coo = asCoo(like);
  return coo != nullptr ? makeCoo(like, *coo, members) : makeCompressed(like, members);
}

Tensor sparseFakeOf(const Tensor& like, at::ArrayRef<Tensor> members) {
  TORCH_CHECK_VALUE(isSparse(like), "`like` was expected to be a sparse tensor, but its layout is ", like.layout(),
                    ".");
  const std::size_t count = sparseMembersOf(like).size();
  TORCH_CHECK_VALUE(members.size() == count, "`members` was expected to have ", count, " tensors, but has ",
                    members.size(), ".");
  for (const Tensor& member : members) {
    checkFake(member);
  }
  return makeSparseFake(like, members);
}

}  // namespace torchext
