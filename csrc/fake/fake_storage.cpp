#include "fake_storage.h"

#include <mutex>
#include <utility>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include "../torch_compat.h"
#include "fake_storage_residents.h"
#include "fake_tensor_impl.h"

namespace torchext {

using c10::DataPtr;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;

namespace {

constexpr const char* kNoData =
    "This tensor is fake: it has a shape, a dtype and a device, but no data to read or write. If it was constructed by "
    "torchext.deferred_init, call torchext.deferred_init.materialize_tensor() on it first; otherwise construct it "
    "outside of torchext.fake.fake_mode().";

struct FakeStorageContext {
  std::shared_ptr<Provenance> provenance;
  // Carried by every tensor on the storage, see `setProvenance()`.
  DispatchKeySet keys;
  // Head of the intrusive list of the tensors on the storage.
  FakeTensorImpl* residents = nullptr;
};

void deleteContext(void* context) {
  delete static_cast<FakeStorageContext*>(context);
}

FakeStorageContext* contextOf(const Storage& storage) noexcept {
  if (!storage) {
    return nullptr;
  }
  const DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &deleteContext ? static_cast<FakeStorageContext*>(data.get_context()) : nullptr;
}

// Guards the lists of residents. Tensors come and go on any thread; nothing runs under this lock but pointer updates.
std::mutex& residentsMutex() {
  static std::mutex mutex;
  return mutex;
}

// The allocator of fake storages, so that they are resizable. It is asked for memory by nobody but code that resizes a
// storage behind the dispatcher's back.
class NoMemoryAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(std::size_t /*nbytes*/) override {
    TORCH_CHECK(false, kNoData);
  }

  void copy_data(void* /*dest*/, const void* /*src*/, std::size_t /*count*/) const override {
    TORCH_CHECK(false, kNoData);
  }
};

c10::Allocator* noMemoryAllocator() {
  static NoMemoryAllocator allocator;
  return &allocator;
}

}  // namespace

Storage makeFakeStorage(std::size_t nbytes, c10::Device device) {
  auto context = std::make_unique<FakeStorageContext>();
  DataPtr data{nullptr, context.get(), &deleteContext, device};
  static_cast<void>(context.release());  // now owned by `data`
  auto impl = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t{}, static_cast<int64_t>(nbytes),
                                               std::move(data), noMemoryAllocator(),
                                               /*resizable=*/true);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoData);
  return Storage{std::move(impl)};
}

bool isFakeStorage(const Storage& storage) noexcept {
  return contextOf(storage) != nullptr;
}

std::shared_ptr<Provenance> provenanceOf(const Storage& storage) {
  const FakeStorageContext* context = contextOf(storage);
  return context == nullptr ? nullptr : context->provenance;
}

void setProvenance(const Storage& storage, std::shared_ptr<Provenance> provenance, DispatchKeySet keys) {
  FakeStorageContext* context = contextOf(storage);
  TORCH_INTERNAL_ASSERT(context != nullptr, "setProvenance() needs a fake storage.");
  const std::lock_guard<std::mutex> lock(residentsMutex());
  // The old provenance goes after the lock is released: its destructor may free tensors, which takes the lock.
  std::swap(context->provenance, provenance);
  if (context->keys != keys) {
    context->keys = keys;
    for (FakeTensorImpl* impl = context->residents; impl != nullptr; impl = impl->next_resident_) {
      impl->addKeys(keys);
    }
  }
}

DispatchKeySet provenanceKeys(const Storage& storage) noexcept {
  const FakeStorageContext* context = contextOf(storage);
  return context == nullptr ? DispatchKeySet{} : context->keys;
}

void becomeReal(const Storage& fake, Storage real) {
  FakeStorageContext* context = contextOf(fake);
  TORCH_INTERNAL_ASSERT(context != nullptr, "becomeReal() needs a fake storage.");
  StorageImpl& impl = *fake.unsafeGetStorageImpl();
  StorageImpl& source = *real.unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(source.device() == impl.device() && real.use_count() == 1);

  DataPtr memory = source.set_data_ptr(DataPtr{nullptr, source.device()});
  {
    const std::lock_guard<std::mutex> lock(residentsMutex());
    const DispatchKeySet fake_keys = context->keys | DispatchKeySet{c10::DispatchKey::Fake};
    while (context->residents != nullptr) {
      FakeTensorImpl* resident = context->residents;
      context->residents = resident->next_resident_;
      resident->unlink();
      resident->removeKeys(fake_keys);
    }
  }
  impl.set_nbytes(source.nbytes());
  impl.set_allocator(source.allocator());
  impl.set_resizable(source.resizable());
  compat::allowDataAccess(impl);
  impl.set_data_ptr_noswap(std::move(memory));  // deletes the context
}

void enrollResident(const Storage& storage, FakeTensorImpl& impl) {
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(residentsMutex());
  impl.next_resident_ = context->residents;
  impl.link_ = &context->residents;
  if (impl.next_resident_ != nullptr) {
    impl.next_resident_->link_ = &impl.next_resident_;
  }
  context->residents = &impl;
  impl.addKeys(context->keys);
}

void strikeResident(FakeTensorImpl& impl) noexcept {
  const std::lock_guard<std::mutex> lock(residentsMutex());
  if (impl.link_ == nullptr) {
    return;
  }
  *impl.link_ = impl.next_resident_;
  if (impl.next_resident_ != nullptr) {
    impl.next_resident_->link_ = impl.link_;
  }
  impl.unlink();
}

}  // namespace torchext
