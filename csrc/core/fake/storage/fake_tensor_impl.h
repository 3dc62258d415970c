#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

namespace torchext {

class Provenance;

// A strided tensor on a fake storage: NOTE [Fake storages]. It claims a real device and carries that
// device's `Autograd*`, `ADInplaceOrView` and `Autocast*` keys plus `Fake`. No additional functions are virtual
// compared with a real tensor, so `dim()`, `sizes()`, `numel()` and `device()` cost the same.
//
// After its storage has become real, an instance behaves like a TensorImpl, and is treated as one everywhere.
class FakeTensorImpl final : public c10::TensorImpl {
 public:
  // Makes a tensor of one dimension and no elements on `storage`. It gets the autograd and autocast keys of a new
  // tensor of this backend, except in inference mode.
  FakeTensorImpl(c10::Storage storage, c10::DispatchKeySet backend_keys, caffe2::TypeMeta dtype);

  // Makes a view. It has exactly `keys`, because its base decides whether it is an inference tensor.
  FakeTensorImpl(ImplType kind, c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype);

  C10_DISABLE_COPY_AND_ASSIGN(FakeTensorImpl);
  ~FakeTensorImpl() override;

  // Like `copyGeometry()`, but faster. Only for a new tensor.
  void initGeometry(const c10::TensorImpl& source);

  // The next three functions take any TensorImpl: a real tensor that was given fake `.data` is not a FakeTensorImpl.

  // Copies the sizes, strides, storage offset and the conjugate and negative bits of `source`.
  static void copyGeometry(c10::TensorImpl& fake, const c10::TensorImpl& source);

  // Copies the geometry of `source`, and gives the storage, which must be fake, `nbytes` bytes. If the storage would be
  // smaller than the geometry, raises and changes nothing: kernels trust that the memory of a tensor holds its
  // elements. Only a storage that is freed (by `untyped_storage().resize_(0)`), or has been, may be smaller.
  static void resizeLike(c10::TensorImpl& fake, const c10::TensorImpl& source, std::size_t nbytes);

  // Moves a tensor to another storage, as `Tensor.set_()` does. On a real storage it becomes, or stays, an ordinary
  // tensor.
  static void moveTo(c10::TensorImpl& tensor, c10::Storage storage);

  // Returns the origin of the bytes that was retained when the tensor became real: see becomeFakeAgain(). Null unless
  // it was set. Dropped when the tensor gets other data.
  const std::shared_ptr<Provenance>& retained() const noexcept {
    return retained_;
  }
  void setRetained(std::shared_ptr<Provenance> retained) noexcept {
    retained_ = std::move(retained);
  }

  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) override;

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override;

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override;

  void release_resources() override;

 protected:
  const char* tensorimpl_type_name() const override {
    return "FakeTensorImpl";
  }

 private:
  friend void addResident(const c10::Storage& storage, FakeTensorImpl& impl);
  friend void addToList(FakeTensorImpl*& first, FakeTensorImpl& impl);
  friend void removeResident(FakeTensorImpl& impl) noexcept;
  friend void setProvenance(const c10::Storage& storage,
                            std::shared_ptr<Provenance> provenance,
                            c10::DispatchKeySet keys);
  friend bool mayHaveProvenance(const at::TensorBase& fake) noexcept;
  friend std::vector<at::Tensor> collect(FakeTensorImpl* first);
  friend void becomeReal(const c10::Storage& fake, const c10::Storage& real);
  friend void becomeFakeAgain(const c10::Storage& real, std::size_t nbytes, at::ArrayRef<at::Tensor> tensors);

  template <typename Version>
  c10::intrusive_ptr<TensorImpl> copyAndDetach(Version&& version_counter, bool allow_tensor_metadata_change) const;

  void addKeys(c10::DispatchKeySet keys) noexcept {
    key_set_ = key_set_ | keys;
  }

  void removeKeys(c10::DispatchKeySet keys) noexcept {
    key_set_ = key_set_ - keys;
  }

  // Drops everything that depends on the storage.
  void leaveStorage() noexcept;

  void linkTo(FakeTensorImpl*& first) noexcept {
    next_resident_ = first;
    link_ = &first;
    if (next_resident_ != nullptr) {
      next_resident_->link_ = &next_resident_;
    }
    first = this;
  }

  void unlink() noexcept {
    next_resident_ = nullptr;
    link_ = nullptr;
  }

  // The next tensor on the same list, and the pointer that points to this tensor. Both are null if it is on no list.
  // `link_` is also read without the lock of storages: if it is null, the tensor was removed from its list, or never
  // added to one.
  FakeTensorImpl* next_resident_ = nullptr;
  std::atomic<FakeTensorImpl**> link_ = nullptr;
  // False only if the storage has had no provenance while this tensor was on it.
  std::atomic<bool> may_have_provenance_ = false;
  std::shared_ptr<Provenance> retained_;
};

// Keys that affect how a tensor is read: conjugated, negated, or as zeros without memory (NOTE [Zeros of forward AD]).
constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

// The backend bit that marks an alias as a tensor that may have no memory: NOTE [Shortcuts that read values].
constexpr c10::BackendComponent kWithoutValues = c10::BackendComponent::MetaBit;

// Returns a form, from which fake tensors take their metadata: a tensor without a storage that has the dtype, storage
// offset and lazy bits of `like`, and its sizes and strides or the given ones.
c10::intrusive_ptr<c10::TensorImpl> makeForm(const at::Tensor& like, c10::IntArrayRef sizes, c10::IntArrayRef strides);
c10::intrusive_ptr<c10::TensorImpl> makeForm(const at::Tensor& like);

// Makes a fake tensor with the dtype and geometry of `form` on `storage`, which must be fake. The inference mode
// decides whether it is an inference tensor.
at::Tensor makeFakeTensor(c10::Storage storage, const c10::TensorImpl& form);

// The same on the storage of `base`, as a view of it. The base decides whether the view is an inference tensor.
at::Tensor makeFakeView(const at::Tensor& base, const c10::TensorImpl& form);

// Returns the keys of a new fake tensor of `dtype` on `device`, without those of autograd and autocast.
c10::DispatchKeySet fakeBackendKeys(c10::ScalarType dtype, c10::Device device);

// Lists of tensors without references to them: those on a fake storage, for NOTE [Materializing in place], and those
// that have retained a recording. A tensor is on one list, and leaves it when it gets other data or is freed.

// Adds `impl` to the list of `storage` and gives it the storage's keys. Does nothing for a real storage.
void addResident(const c10::Storage& storage, FakeTensorImpl& impl);

// Adds `impl`, which is on no list, to the list that begins with `first`.
void addToList(FakeTensorImpl*& first, FakeTensorImpl& impl);

// Returns the tensors on that list.
std::vector<at::Tensor> tensorsOn(FakeTensorImpl* const& first);

// Removes `impl` from its list, if any.
void removeResident(FakeTensorImpl& impl) noexcept;

}  // namespace torchext
