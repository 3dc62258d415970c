#include "known_bytes.h"

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <torchext/fake_tensor.h>

#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../calls/hidden_keys.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "assumed_values.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

std::atomic<std::size_t> bytes_of_all{0};

bool isRoomFor(std::size_t nbytes) noexcept {
  return nbytes <= kFewBytes || (nbytes <= kMaxKnownBytes && bytes_of_all + nbytes <= kMaxKnownBytesOfAll);
}

// What is known, or assumed, of a fake storage. What deferred_init has recorded is none.
class Values : public Provenance {};

// Returns the integers that have as many bytes as an element of `tensor`, or nothing.
std::optional<c10::ScalarType> integersLike(const Tensor& tensor) {
  switch (tensor.itemsize()) {
    case 1:
      return c10::kChar;
    case 2:
      return c10::kShort;
    case 4:
      return c10::kInt;
    case 8:
      return c10::kLong;
    default:
      return std::nullopt;
  }
}

// The bytes of a fake storage.
class KnownBytes final : public Values {
 public:
  // `written` has a byte for each one of `bytes`, with all bits set in those that are known. Null if all are.
  KnownBytes(Storage bytes, ValueKind kind, Storage written = {})
      : bytes_{std::move(bytes)}, written_{std::move(written)}, kind_{kind} {
    bytes_of_all += bytes_.nbytes();
  }
  C10_DISABLE_COPY_AND_ASSIGN(KnownBytes);
  ~KnownBytes() override {
    bytes_of_all -= bytes_.nbytes();
  }

  const Storage& bytes() const noexcept {
    return bytes_;
  }

  ValueKind kind() const noexcept {
    return kind_;
  }

  bool isPart() const noexcept {
    return static_cast<bool>(written_);
  }

  // Returns -1 for each element of `tensor` that has been written. Undefined if no integer type has its size.
  Tensor written(const Tensor& tensor) const {
    const auto dtype = integersLike(tensor);
    return dtype ? makeStridedTensor(written_, *dtype, tensor.sizes(), tensor.strides(), tensor.storage_offset(), {})
                 : Tensor{};
  }

  bool hasAllOf(const Tensor& tensor) const {
    if (!isPart()) {
      return true;
    }
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    const Tensor elements = written(tensor);
    return elements.defined() && elements.eq(-1).all().item().toBool();
  }

 private:
  Storage bytes_;
  Storage written_;
  ValueKind kind_;
};

// Zeros or ones, of which the bytes are made when they are read: many a tensor of zeros is overwritten before.
class KnownFill final : public Values {
 public:
  KnownFill(c10::ScalarType dtype, bool is_ones) : dtype_{dtype}, is_ones_{is_ones} {}

  // Returns null if there is no room.
  std::shared_ptr<KnownBytes> makeBytes(std::size_t nbytes) const {
    if (!isRoomFor(nbytes)) {
      return nullptr;
    }
    Storage bytes = makeZeroStorage(nbytes);
    if (is_ones_) {
      const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
      const auto count = static_cast<std::int64_t>(nbytes / c10::elementSize(dtype_));
      makeStridedTensor(bytes, dtype_, {count}, {1}, 0, {}).fill_(1);
    }
    return std::make_shared<KnownBytes>(std::move(bytes), ValueKind::kKnown);
  }

 private:
  c10::ScalarType dtype_;
  bool is_ones_;
};

// A large tensor whose elements are assumed to repeat.
struct RepeatedElements final : Values {
  RepeatedElements(Tensor repeated, ValueKind its_kind) : pattern{std::move(repeated)}, kind{its_kind} {}

  const Tensor pattern;
  const ValueKind kind;
};

bool hasSmallStorage(const Tensor& tensor) noexcept {
  return tensor.has_storage() && tensor.storage().nbytes() <= kMaxKnownBytes;
}

void setBytes(const Tensor& fake, Storage bytes, ValueKind kind) {
  setProvenance(fake.storage(), std::make_shared<KnownBytes>(std::move(bytes), kind), {});
}

// Returns what is known of the storage of `tensor`, or null.
std::shared_ptr<KnownBytes> bytesOf(const Tensor& tensor) {
  if (!hasSmallStorage(tensor)) {
    return nullptr;
  }
  auto provenance = provenanceOf(tensor.storage());
  if (const auto fill = std::dynamic_pointer_cast<KnownFill>(provenance)) {
    provenance = replaceProvenance(tensor.storage(), *fill, fill->makeBytes(tensor.storage().nbytes()));
  }
  return std::dynamic_pointer_cast<KnownBytes>(std::move(provenance));
}

Tensor showBytes(Storage bytes, const Tensor& like) {
  return makeStridedTensor(std::move(bytes), like.scalar_type(), like.sizes(), like.strides(), like.storage_offset(),
                           like.key_set() & kLazyBits);
}

}  // namespace

bool isSmall(const Tensor& tensor) noexcept {
  // An expanded tensor has more elements than its storage.
  return hasSmallStorage(tensor) && static_cast<std::size_t>(tensor.numel()) * tensor.itemsize() <= kMaxKnownBytes &&
         (tensor.layout() != c10::kStrided || holdsItsElements(tensor));
}

bool areSmall(c10::ArrayRef<c10::IValue> values) {
  bool small = true;
  forEachTensor(values, [&small](const Tensor& tensor) { small = small && isSmall(tensor); });
  return small;
}

bool hasValue(const Tensor& fake) noexcept {
  return fake.has_storage() && (hasSmallStorage(fake) || assumesValues()) && hasProvenance(fake.storage());
}

ValueKind kindOf(const Tensor& fake) {
  const auto provenance = fake.has_storage() ? provenanceOf(fake.storage()) : nullptr;
  if (const auto bytes = std::dynamic_pointer_cast<KnownBytes>(provenance)) {
    return bytes->kind();
  }
  const auto elements = std::dynamic_pointer_cast<RepeatedElements>(provenance);
  return elements == nullptr ? ValueKind::kKnown : elements->kind;
}

Tensor valueOf(const Tensor& tensor, ValueKind accepted) {
  if (!isSmall(tensor)) {
    return {};
  }
  if (!isFake(tensor)) {
    return tensor.is_cpu() && isPlain(tensor) ? tensor : Tensor{};
  }
  const auto known = bytesOf(tensor);
  const bool counts = known != nullptr && (known->kind() == ValueKind::kKnown || accepted != ValueKind::kKnown) &&
                      known->hasAllOf(tensor);
  return counts ? showBytes(known->bytes(), tensor) : Tensor{};
}

void copyBytes(const Tensor& fake, const Tensor& source) {
  const std::size_t nbytes = source.storage().nbytes();
  const auto known = bytesOf(source);
  const Storage from = known == nullptr ? source.storage() : known->bytes();
  if (!isRoomFor(nbytes) || (isFake(source) && (known == nullptr || known->isPart()))) {
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
  if (fake.is_meta() || !isSmall(fake) || !isRoomFor(fake.storage().nbytes())) {
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
  if (hasSmallStorage(fake) && !fake.is_meta()) {
    setProvenance(fake.storage(), std::make_shared<KnownFill>(fake.scalar_type(), value), {});
  }
}

bool makeBytes(const Tensor& fake, ValueKind kind) {
  if (fake.is_meta() || !isRoomFor(fake.storage().nbytes())) {
    return false;
  }
  setBytes(fake, makeZeroStorage(fake.storage().nbytes()), kind);
  return true;
}

bool canKnowPart(const Tensor& fake) {
  if (!isFake(fake) || !isPlain(fake) || fake.is_meta() || !isSmall(fake) ||
      !c10::isIntegralType(fake.scalar_type(), /*includeBool=*/true)) {
    return false;
  }
  const auto known = bytesOf(fake);
  return known == nullptr ? !hasProvenance(fake.storage()) : known->isPart();
}

bool makePart(const Tensor& fake) {
  const std::size_t nbytes = fake.storage().nbytes();
  auto known = bytesOf(fake);
  if (known == nullptr) {
    if (!isRoomFor(nbytes)) {
      return false;
    }
    known = std::make_shared<KnownBytes>(makeZeroStorage(nbytes), ValueKind::kKnown, makeZeroStorage(nbytes));
    setProvenance(fake.storage(), known, {});
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  known->written(fake).fill_(-1);
  return true;
}

std::optional<std::pair<Tensor, Tensor>> partsOf(const Tensor& fake) {
  const auto known = isFake(fake) && isSmall(fake) ? bytesOf(fake) : nullptr;
  const Tensor elements = known != nullptr && known->isPart() ? known->written(fake) : Tensor{};
  if (!elements.defined()) {
    return std::nullopt;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  return std::pair{showBytes(known->bytes(), fake), elements.eq(-1)};
}

bool coversStorage(const Tensor& fake) {
  return isFake(fake) && isPlain(fake) && fake.is_non_overlapping_and_dense() &&
         static_cast<std::size_t>(fake.numel()) * fake.itemsize() == fake.storage().nbytes();
}

void shareBytes(const Tensor& fake, const Tensor& real) {
  const bool is_alike = fake.storage().nbytes() <= real.storage().nbytes() && fake.strides() == real.strides() &&
                        fake.storage_offset() == real.storage_offset();
  if (is_alike && isRoomFor(real.storage().nbytes())) {
    setBytes(fake, real.storage(), ValueKind::kKnown);
  } else if (real.storage().allocator() != nullptr) {  // its memory is PyTorch's own
    setValue(fake, real, ValueKind::kKnown);
  }
}

void markAssumed(const Tensor& fake, ValueKind kind) {
  if (const auto known = bytesOf(fake); known != nullptr && known->kind() != (known->kind() | kind)) {
    setBytes(fake, known->bytes(), known->kind() | kind);
  }
}

Tensor repeated(const Tensor& pattern, c10::IntArrayRef sizes) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  if (pattern.numel() == 1) {
    return pattern.reshape({}).expand(sizes);
  }
  const std::int64_t count = c10::multiply_integers(sizes);
  return pattern.flatten().repeat({count / pattern.numel() + 1}).slice(0, 0, count).view(sizes);
}

void setElements(const Tensor& fake, const Tensor& pattern, ValueKind kind) {
  if (isSmall(fake)) {
    setValue(fake, repeated(pattern, fake.sizes()), kind);
  } else if (coversStorage(fake)) {
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    setProvenance(fake.storage(), std::make_shared<RepeatedElements>(pattern.flatten(), kind), {});
  }
}

Tensor elementsOf(const Tensor& fake) {
  if (!isFake(fake) || !fake.has_storage() || hasSmallStorage(fake)) {
    return {};
  }
  const auto elements = std::dynamic_pointer_cast<RepeatedElements>(provenanceOf(fake.storage()));
  const bool fits = elements != nullptr && elements->pattern.scalar_type() == fake.scalar_type() &&
                    (elements->pattern.numel() == 1 || fake.is_non_overlapping_and_dense());
  return fits ? elements->pattern : Tensor{};
}

void forgetValues(const c10::IValue& tensors) {
  forEachTensor(tensors, [](const Tensor& tensor) {
    if (isFake(tensor) && tensor.has_storage() &&
        std::dynamic_pointer_cast<Values>(provenanceOf(tensor.storage())) != nullptr) {
      setProvenance(tensor.storage(), nullptr, {});
    }
  });
}

void forgetAll(c10::ArrayRef<c10::IValue> values) {
  for (const c10::IValue& value : values) {
    forgetValues(value);
  }
}

}  // namespace torchext
