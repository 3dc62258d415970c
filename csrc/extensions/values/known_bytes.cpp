#include "known_bytes.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/core/Storage.h>
#include <c10/util/accumulate.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/allocation_limit.h"

namespace torchext {

using at::Scalar;
using c10::Storage;

namespace {

std::atomic<std::size_t> bytes_of_all{0};
std::atomic<std::size_t> routed_bytes_of_all{0};

// The number of large storages with values.
std::atomic<std::size_t> num_large{0};

// Returns true if there is room for `copies` times the bytes of a storage.
bool isRoomFor(std::size_t nbytes, std::size_t copies = 1, bool is_routed = false) noexcept {
  if (is_routed && nbytes > kFewBytes) {
    return nbytes <= kMaxRoutedBytes && routed_bytes_of_all + copies * nbytes <= kMaxRoutedBytesOfAll;
  }
  return nbytes <= kFewBytes || (nbytes <= kMaxKnownBytes && bytes_of_all + copies * nbytes <= kMaxKnownBytesOfAll);
}

// Known or assumed values of a fake storage, as opposed to recordings of deferred_init. Their states:
//
//   setFill(), setRange() ---------> UnreadValues
//                                        | madeBytesOf(): the first read
//                                        v
//   setValue(), shareBytes() ------> KnownBytes without marks: all bytes have values of one kind
//                                        | makePart(), markAssumed(), forgetElements() on a part of the storage
//                                        v      ^ makePart() on all of the storage
//   makePart() on a part ----------> KnownBytes with marks: each byte may have a value, of any kind
//
//   setElements(), if too large ---> RepeatedElements
//
// Values that are set replace those in any state, and forgetValues() removes them.
class Values : public Provenance {};

// Returns the values of the storage of `tensor` if they are in the state `T`, or null.
template <typename T>
std::shared_ptr<T> valuesIn(const Tensor& tensor) {
  return std::dynamic_pointer_cast<T>(provenanceOf(tensor.storage()));
}

// The mark of a byte with a value: this bit and the kind of the value. Bytes without a value have the mark 0.
constexpr std::uint8_t kHasValue = 0x80;

constexpr std::uint8_t markOf(ValueKind kind) noexcept {
  return static_cast<std::uint8_t>(kHasValue | static_cast<std::uint8_t>(kind));
}

Tensor bytesIn(const Storage& storage) {
  return makeStridedTensor(storage, c10::kByte, {toSigned(storage.nbytes())}, {1}, 0, {});
}

// Returns the marks of the bytes of `tensor`, with an additional dimension for the bytes of an element. Returns those
// of the whole storage if it does not hold the elements.
Tensor marksIn(const Storage& marks, const Tensor& tensor) {
  if (!isSmall(tensor) || !isPlain(tensor)) {
    return bytesIn(marks);
  }
  const auto itemsize = toSigned(tensor.itemsize());
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  std::vector<std::int64_t> strides = tensor.strides().vec();
  std::transform(strides.begin(), strides.end(), strides.begin(),
                 [=](std::int64_t stride) { return stride * itemsize; });
  sizes.push_back(itemsize);
  strides.push_back(1);
  return makeStridedTensor(marks, c10::kByte, sizes, strides, tensor.storage_offset() * itemsize, {});
}

// The result of looking up the values of a tensor's elements.
struct FoundValues {
  bool are_complete;
  ValueKind kind;  // combined kinds of the existing values
};

// The bytes of a fake storage.
class KnownBytes final : public Values {
 public:
  // `marks` has one mark per byte. If it is null, all bytes have values of `kind`.
  KnownBytes(Storage bytes, ValueKind kind, Storage marks = {})
      : bytes_{std::move(bytes)}, marks_{std::move(marks)}, kind_{kind} {
    total_ += size_;
    num_large += is_large_ ? 1 : 0;
  }
  C10_DISABLE_COPY_AND_ASSIGN(KnownBytes);
  ~KnownBytes() override {
    total_ -= size_;
    num_large -= is_large_ ? 1 : 0;
  }

  const Storage& bytes() const noexcept {
    return bytes_;
  }

  // Returns null if all bytes have values of `kind()`.
  const Storage& marks() const noexcept {
    return marks_;
  }

  ValueKind kind() const noexcept {
    return kind_;
  }

  FoundValues findValues(const Tensor& tensor) const {
    if (!marks_) {
      return {true, kind_};
    }
    const HiddenCalls guard;
    const Tensor marks = marksIn(marks_, tensor).contiguous();
    const auto* const first = marks.const_data_ptr<std::uint8_t>();
    unsigned of_all = kHasValue;
    unsigned of_any = 0;
    std::for_each(first, first + marks.numel(), [&](std::uint8_t mark) {
      of_all &= mark;
      of_any |= mark;
    });
    return {of_all != 0, static_cast<ValueKind>(of_any & ~unsigned{kHasValue})};
  }

 private:
  Storage bytes_;
  Storage marks_;
  ValueKind kind_;
  // A kernel that runs on the values may resize the storages.
  const std::size_t size_{bytes_.nbytes() + (marks_ ? marks_.nbytes() : 0)};
  const bool is_large_{bytes_.nbytes() > kMaxKnownBytes};
  std::atomic<std::size_t>& total_{isRouted(kind_) || is_large_ ? routed_bytes_of_all : bytes_of_all};
};

// The values of a factory, whose bytes are made when they are read: many such tensors are overwritten first, or are
// never read.
class UnreadValues final : public Values {
 public:
  using Write = std::function<void(Tensor& zeros)>;

  UnreadValues(c10::ScalarType dtype, Write write) : dtype_{dtype}, write_{std::move(write)} {}

  // Returns null if there is no room.
  std::shared_ptr<KnownBytes> makeBytes(std::size_t nbytes) const {
    if (!isRoomFor(nbytes)) {
      return nullptr;
    }
    const OwnComputation own;
    Storage bytes = makeZeroStorage(nbytes);
    const HiddenCalls guard;
    const NoObservers no_observers;  // profilers recorded the factory
    const auto count = toSigned(nbytes / c10::elementSize(dtype_));
    Tensor zeros = makeStridedTensor(bytes, dtype_, {count}, {1}, 0, {});
    write_(zeros);
    return std::make_shared<KnownBytes>(std::move(bytes), ValueKind::kKnown);
  }

 private:
  const c10::ScalarType dtype_;
  const Write write_;
};

// A large tensor whose elements are assumed to repeat.
struct RepeatedElements final : Values {
  RepeatedElements(Tensor repeated, ValueKind its_kind) : pattern{std::move(repeated)}, kind{its_kind} {
    ++num_large;
  }
  C10_DISABLE_COPY_AND_ASSIGN(RepeatedElements);
  ~RepeatedElements() override {
    --num_large;
  }

  const Tensor pattern;
  const ValueKind kind;
};

// Returns the limit for the bytes of `tensor`: a larger one if its storage has large values.
std::size_t limitFor(const Tensor& tensor) noexcept {
  const bool has_large = num_large > 0 && tensor.storage().nbytes() > kMaxKnownBytes && isFake(tensor) &&
                         valuesIn<KnownBytes>(tensor) != nullptr;
  return has_large ? kMaxRoutedBytes : kMaxKnownBytes;
}

// Symbolic sizes, of other modes, raise an error when they are read.
bool hasNumbers(const Tensor& tensor) noexcept {
  return tensor.has_storage() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !tensor.storage().unsafeGetStorageImpl()->sym_nbytes().is_heap_allocated();
}

bool hasSmallStorage(const Tensor& tensor) noexcept {
  return hasNumbers(tensor) && tensor.storage().nbytes() <= limitFor(tensor);
}

bool holdsAtMost(const Tensor& tensor, std::size_t limit) noexcept {
  // An expanded tensor has more elements than its storage. Its bytes may exceed 64 bits.
  return hasNumbers(tensor) && tensor.storage().nbytes() <= limit &&
         toSize(tensor.numel()) <= limit / tensor.itemsize() &&
         (tensor.layout() != c10::kStrided || holdsItsElements(tensor));
}

void setBytes(const Tensor& fake, Storage bytes, ValueKind kind, Storage marks = {}) {
  setProvenance(fake.storage(), std::make_shared<KnownBytes>(std::move(bytes), kind, std::move(marks)), {});
}

// Does nothing if the values are too many.
void setUnread(const Tensor& fake, UnreadValues::Write write) {
  if (hasSmallStorage(fake) && !fake.is_meta()) {
    setProvenance(fake.storage(), std::make_shared<UnreadValues>(fake.scalar_type(), std::move(write)), {});
  }
}

// Returns the known bytes of the storage of `tensor`, or null. Makes those of values that were not read.
std::shared_ptr<KnownBytes> madeBytesOf(const Tensor& tensor) {
  if (!hasSmallStorage(tensor)) {
    return nullptr;
  }
  auto provenance = provenanceOf(tensor.storage());
  if (const auto unread = std::dynamic_pointer_cast<UnreadValues>(provenance)) {
    provenance = replaceProvenance(tensor.storage(), *unread, unread->makeBytes(tensor.storage().nbytes()));
  }
  return std::dynamic_pointer_cast<KnownBytes>(std::move(provenance));
}

Tensor showBytes(Storage bytes, const Tensor& like) {
  return makeStridedTensor(std::move(bytes), like.scalar_type(), like.sizes(), like.strides(), like.storage_offset(),
                           like.key_set() & kLazyBits);
}

Storage copyOf(const Storage& storage) {
  if (storage.data() == nullptr) {  // zeros of forward AD have no memory (`ZeroTensorAllocator`)
    return makeZeroStorage(storage.nbytes());
  }
  const HiddenCalls guard;
  return bytesIn(storage).to(c10::kCPU, c10::kByte, /*non_blocking=*/false, /*copy=*/true).storage();
}

bool canHaveValues(const Tensor& fake, ValueKind kind = ValueKind::kKnown) {
  return isFake(fake) && isPlain(fake) && !fake.is_meta() && (isRouted(kind) ? isSmallForRouting(fake) : isSmall(fake));
}

// Returns the marks of the storage of `fake`, whose known bytes, if any, are `known`. Makes marks if it has none.
// Returns null if there is no room.
Storage makeMarks(const Tensor& fake, const KnownBytes* known) {
  if (known != nullptr && known->marks()) {
    return known->marks();
  }
  const std::size_t nbytes = fake.storage().nbytes();
  if (!isRoomFor(nbytes, known == nullptr ? 2 : 1, nbytes > kMaxKnownBytes)) {
    return {};
  }
  Storage marks = makeZeroStorage(nbytes);
  if (known != nullptr) {
    const HiddenCalls guard;
    bytesIn(marks).fill_(markOf(known->kind()));
  }
  setBytes(fake, known == nullptr ? makeZeroStorage(nbytes) : known->bytes(),
           known == nullptr ? ValueKind::kKnown : known->kind(), marks);
  return marks;
}

// Gives all elements of `fake` the mark `mark`, or 0 for none. Returns false if there is no room.
bool markElements(const Tensor& fake, const KnownBytes* known, std::uint8_t mark) {
  const Storage marks = makeMarks(fake, known);
  if (!marks) {
    return false;
  }
  const HiddenCalls guard;
  marksIn(marks, fake).fill_(mark);
  return true;
}

// Reading device memory waits for the device, so only counters are read.
bool canBeRead(const Tensor& source) {
  return isFake(source) || source.is_cpu() || (!source.is_meta() && source.storage().nbytes() == source.itemsize());
}

}  // namespace

bool isSmall(const Tensor& tensor) noexcept {
  return tensor.has_storage() && holdsAtMost(tensor, limitFor(tensor));
}

bool isSmallForRouting(const Tensor& tensor) noexcept {
  return holdsAtMost(tensor, kMaxRoutedBytes);
}

bool areSmall(c10::ArrayRef<c10::IValue> values) {
  return allTensors(values, isSmall);
}

bool hasValue(const Tensor& fake) noexcept {
  return fake.has_storage() && mayHaveProvenance(fake) && (hasSmallStorage(fake) || num_large > 0) &&
         valuesIn<Values>(fake) != nullptr;
}

ValueKind kindOf(const Tensor& fake) {
  const auto provenance = fake.has_storage() ? provenanceOf(fake.storage()) : nullptr;
  if (const auto bytes = std::dynamic_pointer_cast<KnownBytes>(provenance)) {
    return bytes->findValues(fake).kind;
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
  const auto known = madeBytesOf(tensor);
  if (known == nullptr) {
    return {};
  }
  const auto [are_complete, kind] = known->findValues(tensor);
  const bool counts = are_complete && (kind == ValueKind::kKnown || accepted != ValueKind::kKnown);
  return counts ? showBytes(known->bytes(), tensor) : Tensor{};
}

void copyValue(const Tensor& fake, const Tensor& source) {
  const bool are_plain = isPlain(fake) && isPlain(source) && holdsItsElements(source) && !fake.is_meta();
  if (isRecording() || !are_plain || fake.storage().nbytes() != source.storage().nbytes() || !canBeRead(source) ||
      provenanceOf(fake.storage()) != nullptr) {
    return;
  }
  const OwnComputation own;
  const std::size_t nbytes = source.storage().nbytes();
  if (const auto known = madeBytesOf(source)) {
    const Storage& marks = known->marks();
    if (isRoomFor(nbytes, marks ? 2 : 1, isRouted(known->kind()))) {
      setBytes(fake, copyOf(known->bytes()), known->kind(), marks ? copyOf(marks) : Storage{});
    }
  } else if (!isFake(source) && isRoomFor(nbytes)) {
    setBytes(fake, copyOf(source.storage()), ValueKind::kKnown);
  }
}

void setValue(const Tensor& fake, const Tensor& value, ValueKind kind) {
  const bool is_routed = isRouted(kind);
  const bool is_small = is_routed ? isSmallForRouting(fake) : isSmall(fake);
  if (fake.is_meta() || !is_small || !isRoomFor(fake.storage().nbytes(), /*copies=*/1, is_routed)) {
    return;
  }
  const HiddenCalls guard;
  Storage bytes = makeZeroStorage(fake.storage().nbytes());
  if (!fake._is_zerotensor()) {  // zeros of forward AD, which `copy_` refuses to write
    showBytes(bytes, fake).copy_(value);
  }
  setBytes(fake, std::move(bytes), kind);
}

void setFill(const Tensor& fake, bool value) {
  setUnread(fake, [value](Tensor& zeros) {
    if (value) {
      zeros.fill_(1);
    }
  });
}

void setRange(const Tensor& fake, const Scalar& start, const Scalar& end, const Scalar& step) {
  setUnread(fake, [=](Tensor& zeros) { at::arange_out(zeros, start, end, step); });
  if (!c10::isIntegralType(fake.scalar_type(), /*includeBool=*/true)) {
    madeBytesOf(fake);
  }
}

bool canKnowPart(const Tensor& fake) {
  if (!canHaveValues(fake)) {
    return false;
  }
  return madeBytesOf(fake) != nullptr ||
         (c10::isIntegralType(fake.scalar_type(), /*includeBool=*/true) && provenanceOf(fake.storage()) == nullptr);
}

bool makePart(const Tensor& fake, ValueKind kind) {
  if (!canHaveValues(fake, kind)) {
    return false;
  }
  const auto known = madeBytesOf(fake);
  if (known == nullptr && provenanceOf(fake.storage()) != nullptr && valuesIn<RepeatedElements>(fake) == nullptr) {
    return false;  // recorded by deferred_init
  }
  if (coversStorage(fake)) {
    if (known == nullptr && !isRoomFor(fake.storage().nbytes(), /*copies=*/1, isRouted(kind))) {
      return false;
    }
    setBytes(fake, known == nullptr ? makeZeroStorage(fake.storage().nbytes()) : known->bytes(), kind);
    return true;
  }
  const bool is_uniform_kind = known != nullptr && !known->marks() && known->kind() == kind;
  return is_uniform_kind || markElements(fake, known.get(), markOf(kind));
}

std::optional<KnownParts> partsOf(const Tensor& fake, ValueKind accepted) {
  const auto known = canHaveValues(fake) ? madeBytesOf(fake) : nullptr;
  if (known == nullptr || !known->marks() || known->findValues(fake).are_complete) {
    return std::nullopt;
  }
  const HiddenCalls guard;
  const Tensor marks = marksIn(known->marks(), fake);
  const Tensor written = (accepted == ValueKind::kKnown ? marks.eq(markOf(accepted)) : marks.ne(0)).all(-1);
  return written.any().item().toBool() ? std::optional{KnownParts{showBytes(known->bytes(), fake), written}}
                                       : std::nullopt;
}

Tensor withParts(const Tensor& fake, const Tensor& rest) {
  const auto parts = partsOf(fake, ValueKind::kAssumed);
  const HiddenCalls guard;
  return parts ? at::where(parts->written, parts->values, rest) : rest;
}

bool coversStorage(const Tensor& fake) {
  return isFake(fake) && isPlain(fake) && fake.is_non_overlapping_and_dense() &&
         toSize(fake.numel()) * fake.itemsize() == fake.storage().nbytes();
}

void shareBytes(const Tensor& fake, const Tensor& real) {
  const bool is_alike = fake.storage().nbytes() <= real.storage().nbytes() && fake.strides() == real.strides() &&
                        fake.storage_offset() == real.storage_offset();
  if (is_alike && isRoomFor(real.storage().nbytes())) {
    setBytes(fake, real.storage(), ValueKind::kKnown);
  } else if (real.storage().allocator() != nullptr) {  // PyTorch owns its memory
    setValue(fake, real, ValueKind::kKnown);
  }
}

void markAssumed(const Tensor& fake, ValueKind kind) {
  const auto known = madeBytesOf(fake);
  if (known == nullptr) {
    return;
  }
  const bool is_uniform = !known->marks();
  if (is_uniform && known->kind() == (known->kind() | kind)) {
    return;
  }
  const Storage marks = is_uniform && coversStorage(fake) ? Storage{} : makeMarks(fake, known.get());
  if (!marks) {
    setBytes(fake, known->bytes(), known->kind() | kind);
    return;
  }
  const HiddenCalls guard;
  const Tensor of_fake = marksIn(marks, fake);
  of_fake.copy_(at::where(of_fake.eq(0), of_fake, of_fake.bitwise_or(static_cast<std::uint8_t>(kind))));
}

Tensor repeated(const Tensor& pattern, c10::IntArrayRef sizes) {
  const HiddenCalls guard;
  const std::int64_t count = c10::multiply_integers(sizes);
  Tensor result = at::empty(sizes, pattern.options());
  if (count > 0) {
    const Tensor once = pattern.flatten();
    const bool is_alike = once.numel() == 1;  // broadcast
    result.view({-1}).copy_(is_alike ? once : once.repeat({count / once.numel() + 1}).slice(0, 0, count));
  }
  return result;
}

void setElements(const Tensor& fake, const Tensor& pattern, ValueKind kind) {
  const bool has_room =
      isRouted(kind) && isSmallForRouting(fake) && isRoomFor(fake.storage().nbytes(), /*copies=*/1, /*is_routed=*/true);
  if (isSmall(fake) || has_room) {
    setValue(fake, repeated(pattern, fake.sizes()), kind);
  } else if (coversStorage(fake)) {
    const HiddenCalls guard;
    setProvenance(fake.storage(), std::make_shared<RepeatedElements>(pattern.flatten(), kind), {});
  }
}

Tensor elementsOf(const Tensor& fake) {
  if (!isFake(fake) || !fake.has_storage() || hasSmallStorage(fake)) {
    return {};
  }
  const auto elements = valuesIn<RepeatedElements>(fake);
  const bool fits = elements != nullptr && elements->pattern.scalar_type() == fake.scalar_type() &&
                    (elements->pattern.numel() == 1 || fake.is_non_overlapping_and_dense());
  return fits ? elements->pattern : Tensor{};
}

void forgetValues(c10::ArrayRef<c10::IValue> fakes) {
  forEachTensor(fakes, [](const Tensor& tensor) {
    if (isFake(tensor) && tensor.has_storage() && valuesIn<Values>(tensor) != nullptr) {
      setProvenance(tensor.storage(), nullptr, {});
    }
  });
}

void forgetElements(const c10::IValue& tensors) {
  forEachTensor(tensors, [](const Tensor& tensor) {
    const auto known = canHaveValues(tensor) && !coversStorage(tensor) ? madeBytesOf(tensor) : nullptr;
    if (known == nullptr || !markElements(tensor, known.get(), 0)) {
      forgetValues(c10::IValue{tensor});
    }
  });
}

}  // namespace torchext
