#include "known_bytes.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/fake_tensor.h>

#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../calls/hidden_keys.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

std::atomic<std::size_t> bytes_of_all{0};

bool isRoomFor(std::size_t nbytes) noexcept {
  return nbytes <= kFewBytes || (nbytes <= kMaxKnownBytes && bytes_of_all + nbytes <= kMaxKnownBytesOfAll);
}

// The bytes of a fake storage, which may be made when somebody looks at them: many a tensor of zeros is overwritten.
class KnownBytes final : public Provenance {
 public:
  KnownBytes(Storage bytes, ValueKind kind) : bytes_{std::move(bytes)}, kind_{kind} {
    bytes_of_all += bytes_.nbytes();
  }
  KnownBytes(c10::ScalarType dtype, bool fill, std::size_t nbytes)
      : kind_{ValueKind::kKnown}, dtype_{dtype}, fill_{fill}, nbytes_{nbytes} {}
  KnownBytes(const KnownBytes&) = delete;
  KnownBytes& operator=(const KnownBytes&) = delete;
  KnownBytes(KnownBytes&&) = delete;
  KnownBytes& operator=(KnownBytes&&) = delete;
  ~KnownBytes() override {
    bytes_of_all -= bytes_ ? bytes_.nbytes() : 0;
  }

  // Returns no storage if there is no room for the bytes.
  Storage bytes() {
    const std::lock_guard lock{making_};
    if (!bytes_ && isRoomFor(nbytes_)) {
      bytes_ = makeZeroStorage(nbytes_);
      bytes_of_all += nbytes_;
      if (fill_) {
        const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
        const auto count = static_cast<std::int64_t>(nbytes_ / c10::elementSize(dtype_));
        makeStridedTensor(bytes_, dtype_, {count}, {1}, 0, {}).fill_(1);
      }
    }
    return bytes_;
  }

  ValueKind kind() const noexcept {
    return kind_;
  }

 private:
  std::mutex making_;
  Storage bytes_;
  ValueKind kind_;
  c10::ScalarType dtype_ = c10::kByte;
  bool fill_ = false;
  std::size_t nbytes_ = 0;
};

// A large tensor whose elements are assumed to be the same.
class SameElements final : public Provenance {
 public:
  explicit SameElements(Tensor element) : element_{std::move(element)} {}

  const Tensor& element() const noexcept {
    return element_;
  }

 private:
  Tensor element_;
};

bool hasSmallStorage(const Tensor& tensor) noexcept {
  return tensor.has_storage() && tensor.storage().nbytes() <= kMaxKnownBytes;
}

// Returns what is known of the storage of `tensor`, or null.
std::shared_ptr<KnownBytes> bytesOf(const Tensor& tensor) {
  if (!hasSmallStorage(tensor)) {
    return nullptr;
  }
  return std::dynamic_pointer_cast<KnownBytes>(provenanceOf(tensor.storage()));
}

Tensor showBytes(Storage bytes, const Tensor& like) {
  return makeStridedTensor(std::move(bytes), like.scalar_type(), like.sizes(), like.strides(), like.storage_offset(),
                           like.key_set() & kLazyBits);
}

void setBytes(const Tensor& fake, Storage bytes, ValueKind kind) {
  setProvenance(fake.storage(), std::make_shared<KnownBytes>(std::move(bytes), kind), {});
}

}  // namespace

bool isSmall(const Tensor& tensor) noexcept {
  // An expanded tensor has more elements than its storage.
  return hasSmallStorage(tensor) && static_cast<std::size_t>(tensor.numel()) * tensor.itemsize() <= kMaxKnownBytes;
}

bool areSmall(c10::ArrayRef<c10::IValue> values) {
  bool small = true;
  forEachTensor(values, [&small](const Tensor& tensor) { small = small && isSmall(tensor); });
  return small;
}

bool hasValue(const Tensor& fake) noexcept {
  return hasSmallStorage(fake) && hasProvenance(fake.storage());
}

Tensor valueOf(const Tensor& tensor, ValueKind accepted) {
  if (!isSmall(tensor)) {
    return {};
  }
  if (!isFake(tensor)) {
    return tensor.is_cpu() && isPlain(tensor) ? tensor : Tensor{};
  }
  const auto known = bytesOf(tensor);
  const bool counts = known != nullptr && (known->kind() == ValueKind::kKnown || accepted == ValueKind::kAssumed);
  Storage bytes = counts ? known->bytes() : Storage{};
  return bytes ? showBytes(std::move(bytes), tensor) : Tensor{};
}

void copyBytes(const Tensor& fake, const Tensor& source) {
  const std::size_t nbytes = source.storage().nbytes();
  const auto known = bytesOf(source);
  const Storage from = known == nullptr ? source.storage() : known->bytes();
  if (!isRoomFor(nbytes) || !from || (isFake(source) && known == nullptr)) {
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const auto bytes_in = [nbytes](Storage storage) {
    return makeStridedTensor(std::move(storage), c10::kByte, {static_cast<std::int64_t>(nbytes)}, {1}, 0, {});
  };
  const Tensor copy = bytes_in(from).to(c10::kCPU, c10::kByte, /*non_blocking=*/false, /*copy=*/true);
  setBytes(fake, copy.storage(), known == nullptr ? ValueKind::kKnown : known->kind());
}

void setValue(const Tensor& fake, const Tensor& value, ValueKind kind) {
  if (!fake.has_storage() || !isRoomFor(fake.storage().nbytes())) {
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  Storage bytes = makeZeroStorage(fake.storage().nbytes());
  if (!fake._is_zerotensor()) {  // zeros of forward AD, into which `copy_` refuses to write
    showBytes(bytes, fake).copy_(value);
  }
  setBytes(fake, std::move(bytes), kind);
}

void setFill(const Tensor& fake, bool value) {
  if (hasSmallStorage(fake)) {
    setProvenance(fake.storage(), std::make_shared<KnownBytes>(fake.scalar_type(), value, fake.storage().nbytes()), {});
  }
}

void makeBytes(const Tensor& fake, ValueKind kind) {
  if (isRoomFor(fake.storage().nbytes())) {
    setBytes(fake, makeZeroStorage(fake.storage().nbytes()), kind);
  }
}

void markAssumed(const Tensor& fake) {
  if (const auto known = bytesOf(fake); known != nullptr && known->kind() == ValueKind::kKnown) {
    setBytes(fake, known->bytes(), ValueKind::kAssumed);
  }
}

void setEachElement(const Tensor& fake, const Tensor& element) {
  if (isSmall(fake)) {
    setValue(fake, element.expand(fake.sizes()), ValueKind::kAssumed);
  } else if (isPlain(fake)) {
    setProvenance(fake.storage(), std::make_shared<SameElements>(element), {});
  }
}

Tensor eachElementOf(const Tensor& fake) {
  if (!isFake(fake) || !fake.has_storage() || hasSmallStorage(fake)) {
    return {};
  }
  const auto same = std::dynamic_pointer_cast<SameElements>(provenanceOf(fake.storage()));
  return same != nullptr && same->element().scalar_type() == fake.scalar_type() ? same->element() : Tensor{};
}

void forgetValues(const c10::IValue& tensors) {
  forEachTensor(tensors, [](const Tensor& tensor) {
    if (isFake(tensor) && (bytesOf(tensor) != nullptr || eachElementOf(tensor).defined())) {
      setProvenance(tensor.storage(), nullptr, {});
    }
  });
}

}  // namespace torchext
