#include <utility>
#include <vector>

#include <torchext/fake_tensor.h>

#include "../../hooks/hooks.h"
#include "fake_storage.h"
#include "fake_tensor_impl.h"

namespace torchext {

using at::Tensor;

namespace {

Tensor sparseFakeLike(const Tensor& tensor) {
  std::vector<Tensor> members = hooks().layouts.membersOf(tensor);
  for (Tensor& member : members) {
    member = fakeLike(member);
  }
  return hooks().layouts.fakeOf(tensor, members).set_requires_grad(tensor.requires_grad());
}

}  // namespace

bool isFake(const at::TensorBase& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  if (!tensor.has_storage()) {
    return hooks().layouts.isSparseFake(tensor);
  }
  return tensor.key_set().has(c10::DispatchKey::Fake) && isFakeStorage(tensor.storage());
}

Tensor fakeLike(const Tensor& tensor) {
  hooks().layouts.checkCanBeFaked(tensor);
  if (hooks().layouts.isSparse(tensor)) {
    return sparseFakeLike(tensor);
  }
  auto impl =
      c10::make_intrusive<FakeTensorImpl>(makeFakeStorage(tensor.storage().nbytes(), tensor.device()),
                                          fakeBackendKeys(tensor.scalar_type(), tensor.device()), tensor.dtype());
  FakeTensorImpl::copyGeometry(*impl, *tensor.unsafeGetTensorImpl());
  Tensor fake{std::move(impl)};
  fake.set_requires_grad(tensor.requires_grad());
  return fake;
}

}  // namespace torchext
