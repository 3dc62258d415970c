#include "fake.h"

#include <memory>
#include <utility>

#include "../../libraries/support/sizes.h"
#include "../hooks/hooks.h"
#include "fake_key.h"
#include "meta/shadows.h"
#include "storage/fake_factories.h"
#include "storage/fake_keys.h"
#include "storage/fake_storage.h"
#include "storage/fake_tensor_impl.h"

namespace torchext {

using at::Tensor;

namespace {

void checkFake(const Tensor& fake) {
  TORCH_CHECK_VALUE(isFake(fake), "`fake` was expected to be a fake tensor, but it is a real one.");
  TORCH_CHECK_NOT_IMPLEMENTED(fake.has_storage(), "`fake` was expected to be strided, but it has the layout ",
                              fake.layout(), " and no storage. Use its indices and values.");
}

}  // namespace

Tensor metaLike(const Tensor& fake) {
  checkFake(fake);
  return Shadows{Shadows::Kind::kMeta}.of(fake);
}

Tensor viewStorageLike(const Tensor& fake, const Tensor& like) {
  checkFake(fake);
  const c10::Storage& storage = fake.storage();
  auto impl =
      c10::make_intrusive<FakeTensorImpl>(storage, fakeBackendKeys(like.scalar_type(), storage.device()), like.dtype());
  FakeTensorImpl::copyGeometry(*impl, *like.unsafeGetTensorImpl());
  return Tensor{std::move(impl)};
}

Tensor sparseFakeOf(const Tensor& like, at::ArrayRef<Tensor> members) {
  const Layouts& layouts = hooks().layouts;
  TORCH_CHECK_VALUE(layouts.isSparse(like), "`like` was expected to be a sparse tensor, but its layout is ",
                    like.layout(), ".");
  const std::size_t count = layouts.membersOf(like).size();
  TORCH_CHECK_VALUE(members.size() == count, "`members` was expected to have ", count, " tensors, but has ",
                    members.size(), ".");
  for (const Tensor& member : members) {
    checkFake(member);
  }
  return layouts.fakeOf(like, members);
}

struct FakeModeGuard::State {
  FakeFactoriesGuard factories;
};

FakeModeGuard::FakeModeGuard() {
  takeFakeKeys();
  shareFakeKernels();
  state_ = std::make_unique<State>();
}

FakeModeGuard::~FakeModeGuard() = default;

namespace {

Tensor allBytes(c10::Storage storage) {
  const auto nbytes = toSigned(storage.nbytes());
  const c10::DispatchKeySet keys = fakeBackendKeys(c10::kByte, storage.device());
  auto impl = c10::make_intrusive<FakeTensorImpl>(std::move(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
  impl->set_sizes_contiguous({nbytes});
  return Tensor{std::move(impl)};
}

}  // namespace

Tensor fakeBytes(std::int64_t nbytes, c10::Device device) {
  TORCH_CHECK_VALUE(nbytes >= 0, "`nbytes` was expected to be at least 0, but is ", nbytes, ".");
  return allBytes(makeFakeStorage(toSize(nbytes), device));
}

bool isStorageOfFakes(const c10::Storage& storage) {
  return isFakeStorage(storage);
}

Tensor bytesOfStorage(const c10::Storage& storage) {
  TORCH_CHECK_VALUE(isFakeStorage(storage), "`storage` was expected to be a fake storage, but it has memory.");
  return allBytes(storage);
}

void noteForeignWrite(const std::vector<Tensor>& tensors) {
  hooks().values.forget(c10::IValue{tensors});
}

}  // namespace torchext
