#include "fake_storage.h"

#include <atomic>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/leases.h"
#include "../../../libraries/support/locks.h"
#include "../../../libraries/support/sizes.h"
#include "../../torch_internals/autocast_mode.h"
#include "../../torch_internals/open_tensor_impl.h"
#include "../../torch_internals/torch_compat.h"
#include "fake_keys.h"
#include "fake_tensor_impl.h"

namespace torchext {

using c10::DataPtr;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;

namespace {

constexpr const char* kNoData =
    "This tensor is fake: it has a shape, a dtype and a device, but no data to read, write, share or save. If it was "
    "constructed by deferred_init, call torchext.deferred_init.materialize_tensor() on it first; otherwise construct "
    "it outside of fake_mode().";

thread_local bool has_uncounted = false;

thread_local int own_computations = 0;

// The counted memory of a storage: NOTE [Counting memory by storage].
struct CountedMemory {
  CountedMemory() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CountedMemory);
  ~CountedMemory() {
    if (allocation != nullptr) {
      memoryCounter()->free(allocation);
    }
  }

  void* allocation = nullptr;
  // The storage is new, and will be counted when the call that makes it has its results.
  bool is_expected = false;
  bool is_counted = false;
  bool is_pinned = false;
  std::uint8_t label = 0;
  std::uintptr_t host_address = 0;  // set if the address was requested and the counter does not provide one
};

struct FakeStorageContext {
  LeaseHold lease{leaseOfFakes()};
  CountedMemory memory;
  std::shared_ptr<Provenance> provenance;
  // The keys that every tensor on the storage carries: see `setProvenance()`.
  DispatchKeySet keys;
  // Head of the intrusive list of the tensors on the storage.
  FakeTensorImpl* residents = nullptr;
};

void deleteContext(void* context) {
  delete static_cast<FakeStorageContext*>(context);
}

bool hasContext(const Storage& storage) noexcept {
  return storage && storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_deleter() == &deleteContext;
}

// Call it under the lock.
FakeStorageContext* contextOf(const Storage& storage) noexcept {
  return hasContext(storage) ? static_cast<FakeStorageContext*>(
                                   storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context())
                             : nullptr;
}

// The lock `kStorages` guards all contexts, and whether a storage has one. Tensors are made and freed, and storages
// become real, on any thread. Only pointer updates and the acquisition of references (`residentsOf()`) run under this
// lock. Contexts are deleted without it, because they hold a lease, and the end of a lease may call the interpreter.

// The properties of a storage that the counter needs.
struct Countable {
  std::size_t nbytes;
  c10::Device device;
  std::uint8_t label;
};

// Returns the properties of `storage` if it is fake and `is_wanted`, which may change the record, returns true.
template <typename Condition>
std::optional<Countable> countableOf(const Storage& storage, const Condition& is_wanted) {
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr || !is_wanted(context->memory)) {
    return std::nullopt;
  }
  const c10::Device device = context->memory.is_pinned ? kPinnedMemory : storage.device();
  return Countable{storage.nbytes(), device, context->memory.label};
}

// Allocates the memory of `storage`, and frees its previous allocation. The counter may raise, so this runs without the
// lock. If the storage has become real in the meantime, on another thread, nothing is counted.
void count(const Storage& storage, const Countable& countable) {
  MemoryCounter& counter = *memoryCounter();
  const auto [nbytes, device, label] = countable;
  void* outdated = nbytes == 0 ? nullptr : counter.allocate(nbytes, device, label);
  {
    const Locked lock{LockRank::kStorages};
    if (FakeStorageContext* context = contextOf(storage)) {
      std::swap(context->memory.allocation, outdated);
      context->memory.is_counted = true;
    }
  }
  if (outdated != nullptr) {
    counter.free(outdated);
  }
}

// Returns the first of `nbytes` addresses that are never returned again, aligned as in PyTorch's CPU allocator.
// No process can have memory there: the addresses are above those of all fake devices.
std::uintptr_t reserveHostAddresses(std::size_t nbytes) noexcept {
  constexpr std::size_t kAlignment = 64;
  static std::atomic<std::uintptr_t> next{std::uintptr_t{1} << 52};
  // Blocks in host memory are never adjacent.
  return next.fetch_add((nbytes / kAlignment + 2) * kAlignment);
}

// The allocator of fake storages, which makes them resizable. Only code that resizes a storage without the dispatcher
// requests memory from it.
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

// Autocast's cache maps a leaf to its cast for the rest of the region. When the leaf becomes real, the cast does not,
// so it must not be used any more.
void clearAutocastCache() {
  if (autocast::is_autocast_enabled(c10::kCPU) || autocast::is_autocast_enabled(c10::kCUDA)) {
    autocast::clear_cache();
  }
}

}  // namespace

Storage makeFakeStorage(std::size_t nbytes, c10::Device device, bool is_pinned) {
  takeFakeKeys();
  auto context = std::make_unique<FakeStorageContext>();
  context->memory.is_pinned = is_pinned && device.is_cpu();
  const MemoryCounter* counter = memoryCounter();
  if (counter != nullptr && counter->counts(context->memory.is_pinned ? kPinnedMemory : device)) {
    context->memory.is_expected = true;
    has_uncounted = true;
  }
  DataPtr data{nullptr, context.get(), &deleteContext, device};
  context.release();  // NOLINT(bugprone-unused-return-value): now owned by `data`
  auto impl = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t{}, toSigned(nbytes), std::move(data),
                                               noMemoryAllocator(),
                                               /*resizable=*/true);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoData);
  return Storage{std::move(impl)};
}

// Each call of an operator calls this for each of its tensors, so it takes no lock. It reads one pointer, which is
// never read in part on the supported processors. While another thread makes the storage real, either answer is
// possible: programs must not use a tensor then (docs/reference/limitations.md).
bool isFakeStorage(const Storage& storage) noexcept {
  return hasContext(storage);
}

OwnComputation::OwnComputation() noexcept {
  ++own_computations;
}

OwnComputation::~OwnComputation() {
  --own_computations;
}

bool isOwnComputation() noexcept {
  return own_computations > 0;
}

bool takeUncounted() noexcept {
  return std::exchange(has_uncounted, false);
}

void countStorage(const Storage& storage) {
  const auto is_expected = [](CountedMemory& memory) { return std::exchange(memory.is_expected, false); };
  if (const auto countable = countableOf(storage, is_expected)) {
    count(storage, *countable);
  }
}

bool isPinnedStorage(const Storage& storage) noexcept {
  const Locked lock{LockRank::kStorages};
  const FakeStorageContext* context = contextOf(storage);
  return context != nullptr && context->memory.is_pinned;
}

void dismissStorage(const Storage& storage) noexcept {
  const Locked lock{LockRank::kStorages};
  if (FakeStorageContext* context = contextOf(storage)) {
    context->memory.is_expected = false;
  }
}

void countExistingStorage(const Storage& storage) {
  const MemoryCounter* counter = memoryCounter();
  const auto is_uncounted = [](const CountedMemory& memory) { return !memory.is_counted; };
  const auto countable = countableOf(storage, is_uncounted);
  if (countable && counter != nullptr && counter->counts(countable->device)) {
    count(storage, *countable);
  }
}

void resizeFakeStorage(const Storage& storage, std::size_t nbytes) {
  const auto is_counted = [](const CountedMemory& memory) { return memory.is_counted; };
  auto countable = countableOf(storage, is_counted);
  if (countable && countable->nbytes != nbytes) {
    countable->nbytes = nbytes;
    count(storage, *countable);
  }
  std::shared_ptr<Provenance> outgrown;  // freed after the lock is released, see setProvenance()
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr) {
    return;  // it has become real and keeps its size
  }
  if (nbytes > storage.nbytes() && context->keys.empty()) {  // known values; a recording has keys
    std::swap(context->provenance, outgrown);
  }
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  context->memory.host_address = 0;
}

void labelStorage(const Storage& storage, std::uint8_t label) noexcept {
  const Locked lock{LockRank::kStorages};
  if (FakeStorageContext* context = contextOf(storage)) {
    context->memory.label = label;
  }
}

std::uintptr_t addressOfFakeStorage(const Storage& storage) noexcept {
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr || storage.nbytes() == 0) {
    return 0;
  }
  CountedMemory& memory = context->memory;
  const std::uintptr_t address = memory.allocation == nullptr ? 0 : memoryCounter()->addressOf(memory.allocation);
  if (address != 0) {
    return address;
  }
  if (memory.host_address == 0) {
    memory.host_address = reserveHostAddresses(storage.nbytes());
  }
  return memory.host_address;
}

void* allocationOf(const Storage& storage) noexcept {
  const Locked lock{LockRank::kStorages};
  const FakeStorageContext* context = contextOf(storage);
  return context == nullptr ? nullptr : context->memory.allocation;
}

bool isNoDataError(const c10::Error& error) {
  return std::string_view{error.msg()}.find(kNoData) != std::string_view::npos;
}

std::shared_ptr<Provenance> provenanceOf(const Storage& storage) {
  const Locked lock{LockRank::kStorages};
  const FakeStorageContext* context = contextOf(storage);
  return context == nullptr ? nullptr : context->provenance;
}

bool mayHaveProvenance(const at::TensorBase& fake) noexcept {
  const c10::TensorImpl& impl = *fake.unsafeGetTensorImpl();
  return typeid(impl) != typeid(FakeTensorImpl) ||
         static_cast<const FakeTensorImpl&>(impl).may_have_provenance_.load(std::memory_order_relaxed);
}

void setProvenance(const Storage& storage, std::shared_ptr<Provenance> provenance, DispatchKeySet keys) {
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr) {
    return;  // another thread has made it real in the meantime
  }
  // The swap moves the old provenance out of the scope of the lock: its destructor may free tensors, which takes the
  // lock.
  std::swap(context->provenance, provenance);
  if (context->keys != keys || (provenance == nullptr && context->provenance != nullptr)) {
    context->keys = keys;
    for (FakeTensorImpl* impl = context->residents; impl != nullptr; impl = impl->next_resident_) {
      impl->addKeys(keys);
      impl->may_have_provenance_.store(true, std::memory_order_relaxed);
    }
  }
}

std::shared_ptr<Provenance> replaceProvenance(const Storage& storage,
                                              const Provenance& expected,
                                              std::shared_ptr<Provenance> provenance) {
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr) {
    return nullptr;
  }
  if (context->provenance.get() == &expected) {
    std::swap(context->provenance, provenance);  // the caller holds the old one
  }
  return context->provenance;
}

// Call it under the locks that `withReferences()` takes.
std::vector<at::Tensor> collect(FakeTensorImpl* first) {
  std::vector<at::Tensor> tensors;
  for (FakeTensorImpl* impl = first; impl != nullptr; impl = impl->next_resident_) {
    // A tensor that is being freed on another thread stays on the list until that thread has the lock, but can no
    // longer be referenced.
    auto reference = c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(impl);
    if (auto resident = reference.lock()) {
      tensors.emplace_back(std::move(resident));
    }
    reference.release();  // NOLINT(bugprone-unused-return-value): it was not ours
  }
  return tensors;
}

namespace {

// A reference to a tensor that only Python holds is a reference to its object (`try_incref_pyobject()` of c10), for
// which PyTorch takes the interpreter's lock. Threads that hold that lock may wait for ours.
template <typename First>
std::vector<at::Tensor> collectFrom(const First& first) {
  std::vector<at::Tensor> tensors;
  interpreter().withLock([&] {
    const Locked lock{LockRank::kStorages};
    tensors = collect(first());
  });
  return tensors;
}

}  // namespace

std::vector<at::Tensor> residentsOf(const Storage& storage) {
  return collectFrom([&] {
    const FakeStorageContext* context = contextOf(storage);
    return context == nullptr ? nullptr : context->residents;
  });
}

std::vector<at::Tensor> tensorsOn(FakeTensorImpl* const& first) {
  return collectFrom([&first] { return first; });
}

void becomeReal(const Storage& fake, const Storage& real) {
  clearAutocastCache();
  StorageImpl& impl = *fake.unsafeGetStorageImpl();
  StorageImpl& source = *real.unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(source.device() == impl.device() && real.use_count() == 1);
  std::shared_ptr<Provenance> provenance;  // freed after the lock is released, see setProvenance()
  DataPtr outdated;                        // holds the context
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(fake);
  if (context == nullptr) {
    return;  // another thread has already made it real
  }
  std::swap(context->provenance, provenance);
  const DispatchKeySet fake_keys = context->keys | kFakeKeys;
  while (context->residents != nullptr) {
    FakeTensorImpl* resident = context->residents;
    context->residents = resident->next_resident_;
    resident->removeKeys(fake_keys);
    resident->unlink();  // last, because another thread may then free it without waiting for the lock
  }
  impl.set_nbytes(source.nbytes());
  impl.set_allocator(source.allocator());
  impl.set_resizable(source.resizable());
  compat::allowDataAccess(impl);
  outdated = impl.set_data_ptr(source.set_data_ptr(DataPtr{nullptr, source.device()}));
}

void becomeFakeAgain(const Storage& real, std::size_t nbytes, at::ArrayRef<at::Tensor> tensors) {
  StorageImpl& impl = *real.unsafeGetStorageImpl();
  auto context = std::make_unique<FakeStorageContext>();
  DataPtr data{nullptr, context.get(), &deleteContext, impl.device()};
  context.release();  // NOLINT(bugprone-unused-return-value): now owned by `data`
  {
    const Locked lock{LockRank::kStorages};
    TORCH_INTERNAL_ASSERT(contextOf(real) == nullptr);
    std::swap(data, impl._mutable_data_ptr_no_checks());  // the memory is freed after the lock is released
    impl.set_nbytes(nbytes);
    impl.set_allocator(noMemoryAllocator());
    impl.set_resizable(true);
    impl.release_data_and_set_meta_custom_data_ptr_error_msg_(kNoData);
  }
  for (const at::Tensor& tensor : tensors) {
    auto& resident = dynamic_cast<FakeTensorImpl&>(*tensor.unsafeGetTensorImpl());
    resident.addKeys(kFakeKeys);
    addResident(real, resident);
  }
}

void dropStaleKeys(const at::TensorBase& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // Another owner of the `Fake` key gives its tensors only that key: NOTE [Two owners of the Fake key].
  if (impl.key_set().has_all(kFakeKeys) && impl.has_storage() && !isFakeStorage(impl.storage())) {
    DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
    keys = keys - kFakeKeys - DispatchKeySet{c10::DispatchKey::DeferredInit};
  }
}

void addResident(const Storage& storage, FakeTensorImpl& impl) {
  const Locked lock{LockRank::kStorages};
  FakeStorageContext* context = contextOf(storage);
  if (context == nullptr) {
    return;
  }
  impl.linkTo(context->residents);
  impl.addKeys(context->keys);
  impl.may_have_provenance_.store(context->provenance != nullptr, std::memory_order_relaxed);
}

void addToList(FakeTensorImpl*& first, FakeTensorImpl& impl) {
  const Locked lock{LockRank::kStorages};
  impl.linkTo(first);
}

void removeResident(FakeTensorImpl& impl) noexcept {
  if (impl.link_ == nullptr) {
    return;
  }
  const Locked lock{LockRank::kStorages};
  FakeTensorImpl** link = impl.link_;
  if (link == nullptr) {
    return;
  }
  *link = impl.next_resident_;
  if (impl.next_resident_ != nullptr) {
    impl.next_resident_->link_ = link;
  }
  impl.unlink();
}

}  // namespace torchext
