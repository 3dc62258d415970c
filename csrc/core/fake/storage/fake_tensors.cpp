#include <utility>
#include <vector>

#include <torchext/fake_tensor.h>

#include "../layouts/layout.h"
#include "fake_storage.h"
#include "fake_tensor_impl.h"

namespace torchext {

using at::Tensor;

namespace {

Tensor fakeLikeWithMembers(const Tensor& tensor, const LayoutHandler& layout) {
  std::vector<Tensor> members = layout.membersOf(tensor);
  for (Tensor& member : members) {
    member = fakeLike(member);
  }
  return layout.fakeOf(tensor, members).set_requires_grad(tensor.requires_grad());
}

}  // namespace

bool isFake(const at::TensorBase& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  if (!tensor.has_storage()) {
    const LayoutHandler* layout = layoutOf(tensor);
    return layout != nullptr && layout->isFake(tensor);
  }
  return tensor.key_set().has(c10::DispatchKey::Fake) && isFakeStorage(tensor.storage());
}

Tensor fakeLike(const Tensor& tensor) {
  checkLayoutCanBeFaked(tensor);
  if (const LayoutHandler* layout = layoutOf(tensor)) {
    return fakeLikeWithMembers(tensor, *layout);
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
