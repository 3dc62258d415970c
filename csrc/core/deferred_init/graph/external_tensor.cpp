#include "external_tensor.h"

#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include "../../fake/fake.h"
#include "../../support/locks.h"
#include "../../support/plain_tensors.h"
#include "../../support/sizes.h"
#include "../state/real_dispatch.h"
#include "op_graph.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::Storage;

namespace {

// Returns true if the tensor has values in memory that can be read here and that other code may change.
bool showsMemory(const Tensor& tensor) {
  return !isFake(tensor) && !tensor.is_meta() && !tensor._is_zerotensor() && !tensor.key_set().has(DispatchKey::Python);
}

// The byte range of a plain tensor, from its first to its last element.
struct Span {
  explicit Span(const Tensor& tensor)
      : begin{toSize(tensor.storage_offset()) * tensor.itemsize()},
        nbytes{tensor.numel() == 0 ? 0 : neededBytes(tensor) - begin} {}

  std::size_t begin;
  std::size_t nbytes;
};

// The storages that small tensors were copied to, for as long as a recording refers to them. They are never written.
class SharedCopies {
 public:
  // Returns a storage that holds `bytes` from `offset` on. Threads that request equal bytes at the same time may get
  // separate copies.
  Storage of(const Tensor& bytes, std::size_t offset);

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  static bool holds(const Storage& storage, const Tensor& bytes, std::size_t offset);
  // Only references are taken and kept under the lock. No tensor is made, read or freed under it: a tracker of real
  // memory takes locks for that.
  std::vector<Storage> storagesWith(std::uint64_t key);
  void add(std::uint64_t key, const Storage& copy);
  void dropFreed();

  std::unordered_multimap<std::uint64_t, WeakStorage> copies_;
  // The number of entries above which entries of freed storages are dropped.
  std::size_t limit_ = 64;
};

bool SharedCopies::holds(const Storage& storage, const Tensor& bytes, std::size_t offset) {
  return storage.device() == bytes.device() && storage.nbytes() == offset + bytes.nbytes() &&
         bytesAt(storage, offset, bytes.nbytes()).equal(bytes);
}

Storage SharedCopies::of(const Tensor& bytes, std::size_t offset) {
  const std::uint64_t key = digestOf(bytes).low ^ offset;
  for (const Storage& known : storagesWith(key)) {
    if (holds(known, bytes, offset)) {
      return known;
    }
  }
  const auto size = toSigned(offset + bytes.nbytes());
  Storage copy = at::empty({size}, at::TensorOptions(c10::kByte).device(bytes.device())).storage();
  bytesAt(copy, offset, bytes.nbytes()).copy_(bytes);
  add(key, copy);
  return copy;
}

std::vector<Storage> SharedCopies::storagesWith(std::uint64_t key) {
  std::vector<Storage> found;
  const Locked lock{LockRank::kSharedCopies};
  const auto [begin, end] = copies_.equal_range(key);
  for (auto entry = begin; entry != end; ++entry) {
    if (Storage known{entry->second.lock()}) {
      found.push_back(std::move(known));
    }
  }
  return found;
}

void SharedCopies::add(std::uint64_t key, const Storage& copy) {
  const Locked lock{LockRank::kSharedCopies};
  dropFreed();
  copies_.emplace(key, copy.getWeakStorageImpl());
}

void SharedCopies::dropFreed() {
  if (copies_.size() < limit_) {
    return;
  }
  for (auto entry = copies_.begin(); entry != copies_.end();) {
    entry = entry->second.expired() ? copies_.erase(entry) : std::next(entry);
  }
  limit_ = 2 * copies_.size() + 64;
}

// Leaked, since recordings may be made until the process ends.
SharedCopies& sharedCopies() {
  static auto* copies = new SharedCopies;
  return *copies;
}

// Kernels may round differently depending on the alignment of their operands, so the copy keeps the alignment.
std::size_t alignmentOffset(const Tensor& tensor) {
  constexpr std::size_t kAlignment = 64;  // of the CPU allocator's blocks
  const std::size_t offset =
      tensor.is_cpu() ? reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment : 0;
  return offset % tensor.itemsize() == 0 ? offset : 0;
}

// Keeps the strides, including gaps: results may depend on them.
Tensor copyOf(const Tensor& tensor, const Span& span) {
  const RealDispatch guard;
  const std::size_t offset = alignmentOffset(tensor);
  Geometry geometry = Geometry::of(tensor);
  geometry.storage_offset = toSigned(offset / tensor.itemsize());
  return geometry.makeTensor(sharedCopies().of(bytesAt(tensor.storage(), span.begin, span.nbytes), offset));
}

Tensor cloneOf(const Tensor& tensor) {
  const RealDispatch guard;
  return tensor.clone();
}

// Shares the version counter, but keeps no autograd graph alive and is unaffected by changes of metadata.
Tensor aliasOf(const Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return Tensor{impl.shallow_copy_and_detach(impl.version_counter(), /*allow_tensor_metadata_change=*/true)};
}

// A wrapper has a storage without memory.
bool hasMemory(const Tensor& tensor) {
  return isPlain(tensor) && holdsItsElements(tensor) &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

// Returns a tensor with the memory of `tensor`, but without its handlers.
Tensor memoryOf(const Tensor& tensor) {
  return Geometry::of(tensor).makeTensor(tensor.storage());
}

}  // namespace

ExternalTensor::ExternalTensor(const Tensor& tensor) {
  if (!showsMemory(tensor)) {
    const bool has_handler = tensor.key_set().has(DispatchKey::Python);
    tensor_ = has_handler ? tensor : aliasOf(tensor);
    if (has_handler && hasMemory(tensor)) {
      digest_ = digestOf(memoryOf(tensor));
    } else if (has_handler && !tensor.is_inference()) {
      version_ = tensor._version();
    }
  } else if (!isPlain(tensor)) {
    tensor_ = cloneOf(tensor);
  } else {
    TORCH_CHECK(holdsItsElements(tensor), "A real tensor of shape ", tensor.sizes(),
                " is read by a recorded operator, but its storage has only ", tensor.storage().nbytes(),
                " bytes: its memory has been freed. Read it before it is freed.");
    if (const Span span{tensor}; span.nbytes <= kMaxCopiedBytes) {
      tensor_ = copyOf(tensor, span);
    } else {
      tensor_ = aliasOf(tensor);
      digest_ = digestOf(tensor);
    }
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor_.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

void ExternalTensor::check(const c10::OperatorName& op) const {
  TORCH_CHECK(
      !isFake(tensor_), "`", op, "` was recorded with a fake tensor of shape ", tensor_.sizes(),
      " that was not constructed by deferred_init, so its result cannot be computed. Construct that tensor inside "
      "deferred_init, or make it real before it is used.");
  const auto check_unchanged = [&](bool is_unchanged) {
    TORCH_CHECK(is_unchanged, "`", op, "` was recorded with a real tensor of shape ", tensor_.sizes(),
                " that has been changed in place since, so the recorded result cannot be computed any more. "
                "Materialize before changing the tensor, or pass `tensor.clone()` to the operator.");
  };
  check_unchanged(!version_ || tensor_._version() == *version_);
  if (!digest_) {
    return;
  }
  TORCH_CHECK(holdsItsElements(tensor_), "`", op, "` was recorded with a real tensor of shape ", tensor_.sizes(),
              " whose memory has been freed since, so the recorded result cannot be computed any more. Materialize "
              "before freeing it, or pass `tensor.clone()` to the operator.");
  check_unchanged(digestOf(memoryOf(tensor_)) == *digest_);
}

}  // namespace torchext
