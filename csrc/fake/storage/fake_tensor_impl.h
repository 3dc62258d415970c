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

// A strided tensor on a fake storage: NOTE [The storage is what is fake]. It claims a real device and carries that
// device's `Autograd*`, `ADInplaceOrView` and `Autocast*` keys plus `Fake`. Nothing is virtual that is plain on a real
// tensor, so `dim()`, `sizes()`, `numel()` and `device()` cost the same.
//
// Once its storage has become real, an instance behaves as a TensorImpl and is treated as one everywhere.
class FakeTensorImpl final : public c10::TensorImpl {
 public:
  // A tensor of one dimension and no elements on `storage`. Gets the autograd and autocast keys that a new tensor of
  // this backend gets: those are left out in inference mode.
  FakeTensorImpl(c10::Storage storage, c10::DispatchKeySet backend_keys, caffe2::TypeMeta dtype);

  // A view: takes `keys` as they are, because whether a view is an inference tensor is decided by its base.
  FakeTensorImpl(ImplType kind, c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype);

  FakeTensorImpl(const FakeTensorImpl&) = delete;
  FakeTensorImpl& operator=(const FakeTensorImpl&) = delete;
  FakeTensorImpl(FakeTensorImpl&&) = delete;
  FakeTensorImpl& operator=(FakeTensorImpl&&) = delete;
  ~FakeTensorImpl() override;

  // Takes over sizes, strides, storage offset and the conjugate and negative bits of `source`.
  void copyGeometry(const c10::TensorImpl& source);

  // Moves to another storage, as `Tensor.set_()` does. On a real one it becomes an ordinary tensor.
  void moveTo(c10::Storage storage);

  // What is kept of how the bytes came about, after the tensor has become real: see becomeFakeAgain(). Null unless
  // somebody has set it; dropped when the tensor is given other data.
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
  friend void enrollResident(const c10::Storage& storage, FakeTensorImpl& impl);
  friend void strikeResident(FakeTensorImpl& impl) noexcept;
  friend void setProvenance(const c10::Storage& storage,
                            std::shared_ptr<Provenance> provenance,
                            c10::DispatchKeySet keys);
  friend std::vector<at::Tensor> residentsOf(const c10::Storage& storage);
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

  void unlink() noexcept {
    next_resident_ = nullptr;
    link_ = nullptr;
  }

  // The next tensor on the same storage, and the pointer that points here; both null when on no list. That is also
  // asked without the storages' lock: who finds null has been taken off, or was never put on.
  FakeTensorImpl* next_resident_ = nullptr;
  std::atomic<FakeTensorImpl**> link_ = nullptr;
  std::shared_ptr<Provenance> retained_;
};

// The bits of a view that is to be conjugated or negated when it is read.
constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// What an alias carries to be taken for a tensor that may have no memory: NOTE [Shortcuts that read values].
constexpr c10::DispatchKeySet kWithoutValues{c10::BackendComponent::MetaBit};

// A fake tensor on `storage`, which is fake and shown by no argument of the call, with the dtype and geometry of
// `form`.
at::Tensor makeFakeTensor(c10::Storage storage, const c10::TensorImpl& form);

// The same on the storage of `base`, as a view of it: whether a view is an inference tensor is decided by its base.
at::Tensor makeFakeView(const at::Tensor& base, const c10::TensorImpl& form);

// The keys of a new fake tensor of `dtype` on `device`, before autograd's and autocast's are added.
c10::DispatchKeySet fakeBackendKeys(c10::ScalarType dtype, c10::Device device);

}  // namespace torchext
