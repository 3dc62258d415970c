#include "fake_tensor_impl.h"

#include <utility>

#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/plain_tensors.h"
#include "../../hooks/hooks.h"
#include "fake_keys.h"
#include "fake_storage.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;
using c10::VariableVersion;

namespace {

// Returns true if the user's TorchDispatchMode must receive `detach()`, as for real tensors: TensorImpl's own
// implementation calls the interpreter if a mode is active.
bool isDispatchModeActive() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);
}

// Returns `keys` with the lazy bits of `source` in place of those of `keys`.
DispatchKeySet withLazyBitsOf(const TensorImpl& source, DispatchKeySet keys) {
  const DispatchKeySet bits = source.key_set() & kLazyBits;
  if (!bits.empty()) {
    hooks().on_lazy_bits(bits);
  }
  return (keys - kLazyBits) | bits;
}

}  // namespace

FakeTensorImpl::FakeTensorImpl(Storage storage, DispatchKeySet backend_keys, caffe2::TypeMeta dtype)
    : TensorImpl(std::move(storage), backend_keys, dtype) {
  addResident(storage_, *this);
}

FakeTensorImpl::FakeTensorImpl(ImplType kind, Storage storage, DispatchKeySet keys, caffe2::TypeMeta dtype)
    : TensorImpl(kind, std::move(storage), keys, dtype) {
  addResident(storage_, *this);
}

FakeTensorImpl::~FakeTensorImpl() {
  removeResident(*this);
}

void FakeTensorImpl::release_resources() {
  leaveStorage();
  TensorImpl::release_resources();
}

void FakeTensorImpl::initGeometry(const TensorImpl& source) {
  key_set_ = withLazyBitsOf(source, key_set_);
  sizes_and_strides_ = source.*(&FakeTensorImpl::sizes_and_strides_);
  storage_offset_ = source.storage_offset();
  numel_ = source.numel();
  is_contiguous_ = source.is_contiguous();
  is_channels_last_ = source.is_strides_like_channels_last();
  is_channels_last_contiguous_ = source.is_contiguous(c10::MemoryFormat::ChannelsLast);
  is_channels_last_3d_ = source.is_strides_like_channels_last_3d();
  is_channels_last_3d_contiguous_ = source.is_contiguous(c10::MemoryFormat::ChannelsLast3d);
  is_non_overlapping_and_dense_ = source.is_non_overlapping_and_dense();
}

// Members of TensorImpl are accessed as members of this class: see OpenTensorImpl. `set_sizes_and_strides()` would
// refuse a tensor returned by `.data`, but the kernel has already refused it.
void FakeTensorImpl::copyGeometry(TensorImpl& fake, const TensorImpl& source) {
  DispatchKeySet& keys = fake.*(&FakeTensorImpl::key_set_);
  keys = withLazyBitsOf(source, keys);
  (fake.*(&FakeTensorImpl::sizes_and_strides_)).set_sizes(source.sizes());
  (fake.*(&FakeTensorImpl::sizes_and_strides_)).set_strides(source.strides());
  fake.*(&FakeTensorImpl::storage_offset_) = source.storage_offset();
  (fake.*(&FakeTensorImpl::refresh_numel))();
  (fake.*(&FakeTensorImpl::refresh_contiguous))();
}

void FakeTensorImpl::resizeLike(TensorImpl& fake, const TensorImpl& source, std::size_t nbytes) {
  const Storage& storage = fake.storage();
  const bool is_freed = nbytes < storage.nbytes() || neededBytes(fake) > storage.nbytes();
  TORCH_INTERNAL_ASSERT(is_freed || neededBytes(source) <= nbytes, "a tensor of shape ", source.sizes(),
                        " and strides ", source.strides(), " does not fit into ", nbytes, " bytes");
  if (nbytes != storage.nbytes()) {
    TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");  // `resize_bytes_cpu()`
    resizeFakeStorage(storage, nbytes);
  }
  copyGeometry(fake, source);
}

void FakeTensorImpl::moveTo(TensorImpl& tensor, Storage storage) {
  auto* resident = dynamic_cast<FakeTensorImpl*>(&tensor);
  if (resident != nullptr) {
    resident->leaveStorage();
  }
  const bool stays_fake = isFakeStorage(storage);
  tensor.*(&FakeTensorImpl::device_opt_) = storage.device();
  tensor.*(&FakeTensorImpl::storage_) = std::move(storage);
  DispatchKeySet& keys = tensor.*(&FakeTensorImpl::key_set_);
  keys = (keys - kFakeKeys - DispatchKeySet{DispatchKey::DeferredInit}) | (stays_fake ? kFakeKeys : DispatchKeySet{});
  if (stays_fake && resident != nullptr) {
    addResident(resident->storage_, *resident);
  }
}

void FakeTensorImpl::leaveStorage() noexcept {
  removeResident(*this);
  retained_ = nullptr;
}

void FakeTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) {
  leaveStorage();
  TensorImpl::shallow_copy_from(source);
  addResident(storage_, *this);
}

template <typename Version>
c10::intrusive_ptr<TensorImpl> FakeTensorImpl::copyAndDetach(Version&& version_counter,
                                                             bool allow_tensor_metadata_change) const {
  if (!isFakeStorage(storage_) || isDispatchModeActive()) {
    return TensorImpl::shallow_copy_and_detach(std::forward<Version>(version_counter), allow_tensor_metadata_change);
  }
  auto copy = c10::make_intrusive<FakeTensorImpl>(Storage{storage_}, key_set_, data_type_);
  copy_tensor_metadata(this, copy.get(), std::forward<Version>(version_counter), allow_tensor_metadata_change);
  return copy;
}

c10::intrusive_ptr<TensorImpl> FakeTensorImpl::shallow_copy_and_detach(const VariableVersion& version_counter,
                                                                       bool allow_tensor_metadata_change) const {
  return copyAndDetach(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<TensorImpl> FakeTensorImpl::shallow_copy_and_detach(VariableVersion&& version_counter,
                                                                       bool allow_tensor_metadata_change) const {
  return copyAndDetach(std::move(version_counter), allow_tensor_metadata_change);
}

c10::intrusive_ptr<TensorImpl> makeForm(const at::Tensor& like, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const DispatchKeySet keys{c10::computeDispatchKey(like.scalar_type(), c10::kStrided, c10::kMeta)};
  auto form = c10::make_intrusive<TensorImpl>(keys | (like.key_set() & kLazyBits), like.dtype(), c10::kMeta);
  form->set_sizes_and_strides(sizes, strides, like.storage_offset());
  return form;
}

c10::intrusive_ptr<TensorImpl> makeForm(const at::Tensor& like) {
  return makeForm(like, like.sizes(), like.strides());
}

at::Tensor makeFakeTensor(Storage storage, const TensorImpl& form) {
  const DispatchKeySet backend_keys = fakeBackendKeys(c10::typeMetaToScalarType(form.dtype()), storage.device());
  auto fake = c10::make_intrusive<FakeTensorImpl>(std::move(storage), backend_keys, form.dtype());
  fake->initGeometry(form);
  return at::Tensor{std::move(fake)};
}

at::Tensor makeFakeView(const at::Tensor& base, const TensorImpl& form) {
  const DispatchKeySet keys = base.device().is_meta() ? base.key_set() : base.key_set().remove_backend(kWithoutValues);
  auto fake = c10::make_intrusive<FakeTensorImpl>(TensorImpl::VIEW, Storage{base.storage()}, keys, form.dtype());
  fake->initGeometry(form);
  return at::Tensor{std::move(fake)};
}

DispatchKeySet fakeBackendKeys(c10::ScalarType dtype, c10::Device device) {
  return DispatchKeySet{c10::computeDispatchKey(dtype, c10::kStrided, device)} | kFakeKeys;
}

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
  if (Tensor sparse = hooks().layouts.fakeLike(tensor); sparse.defined()) {
    return sparse;
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
