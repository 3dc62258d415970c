#pragma once

// The bytes that are known of fake storages: NOTE [Constants keep their values], NOTE [Assumed values]. Safe to call
// from several threads; those that write to one tensor at once must order their calls, as with real memory.

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

namespace torchext {

constexpr std::size_t kMaxKnownBytes = std::size_t{1} << 20;        // of one storage
constexpr std::size_t kMaxKnownBytesOfAll = std::size_t{64} << 20;  // of all storages,
constexpr std::size_t kFewBytes = 1024;                             // but for those of so few bytes

// Where values come from. Of assumed ones also by which policies: NOTE [Assumed values]. Kinds are combined by `|`.
enum class ValueKind : std::uint8_t { kKnown = 0, kAssumed = 1, kByMasks = 3, kByRouting = 5 };

constexpr ValueKind operator|(ValueKind a, ValueKind b) noexcept {
  return static_cast<ValueKind>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}

// Returns true if the storage of `tensor` and its elements are few enough for values. Cheap.
bool isSmall(const at::Tensor& tensor) noexcept;

// The same for all tensors in `values`.
bool areSmall(c10::ArrayRef<c10::IValue> values);

// Returns true if the storage of `fake` has known or assumed values, those of setElements() included. Takes the lock of
// the storages if it may have some.
bool hasValue(const at::Tensor& fake) noexcept;

// Returns the kind of the values of `fake`, those of setElements() included: kKnown if there are none. Where elements
// have values of several kinds, these are combined.
ValueKind kindOf(const at::Tensor& fake);

// Returns a real tensor on the CPU with the values of `tensor`, which shares their memory, or an undefined one if there
// are none. Those that are assumed count if `accepted` says so. A real tensor on the CPU has its own.
TORCHEXT_API at::Tensor valueOf(const at::Tensor& tensor, ValueKind accepted = ValueKind::kKnown);

// Copies the bytes of `source`, which has the geometry and the storage size of `fake`, if there are any, and which of
// them are known or assumed.
void copyBytes(const at::Tensor& fake, const at::Tensor& source);

// Gives `fake`, which is alone on its storage, the values of `value`. Does nothing if they are too many.
void setValue(const at::Tensor& fake, const at::Tensor& value, ValueKind kind);

// Returns true if the elements of `fake` are all of its storage, each once.
bool coversStorage(const at::Tensor& fake);

// Lets the values of `fake`, which is new, be those in the memory of `real`, which others may write to. Does nothing if
// they are too many.
void shareBytes(const at::Tensor& fake, const at::Tensor& real);

// Makes each element of `fake`, which covers its storage, zero or one. Takes no memory until these are read.
void setFill(const at::Tensor& fake, bool value);

// Gives the storage of `fake` zeros, so that values can be written. Returns false if they would be too many.
bool makeBytes(const at::Tensor& fake, ValueKind kind);

// Returns true if values that are written to `fake`, a part of its storage, can be known: the storage is one of
// integers, or has bytes. The rest does not change.
bool canKnowPart(const at::Tensor& fake);

// Makes the elements of `fake`, which may be a part of its storage, values of `kind`, so that they can be written.
// Those that had no values are zero. The rest of the storage does not change: what was unknown remains so. Returns
// false if values cannot be kept for `fake`, or would be too many.
bool makePart(const at::Tensor& fake, ValueKind kind);

// Some elements of a tensor have values, the others have none.
struct KnownParts {
  at::Tensor values;
  at::Tensor written;  // truth values: which elements have one
};

// Returns which elements of `fake` have values, if some have, but not all. Those that are assumed count if `accepted`
// says so.
TORCHEXT_API std::optional<KnownParts> partsOf(const at::Tensor& fake, ValueKind accepted = ValueKind::kKnown);

// Returns `rest`, which is real and has the sizes and the dtype of `fake`, with the elements of `fake` that have
// values.
at::Tensor withParts(const at::Tensor& fake, const at::Tensor& rest);

// The values of `fake` have been written with assumed ones, and are assumed from now on. Elements without values remain
// unknown.
void markAssumed(const at::Tensor& fake, ValueKind kind);

// Returns a new contiguous tensor of `sizes` whose elements are those of `pattern`, which is real, repeated.
at::Tensor repeated(const at::Tensor& pattern, c10::IntArrayRef sizes);

// Assumes that the elements of `fake`, however many these are, are those of `pattern`, which is real, repeated.
void setElements(const at::Tensor& fake, const at::Tensor& pattern, ValueKind kind);

// Returns the pattern that setElements() has set for a large tensor, a vector, or an undefined tensor.
at::Tensor elementsOf(const at::Tensor& fake);

// Forgets the values of the fakes in `tensors`, to which something else has written.
TORCHEXT_API void forgetValues(const c10::IValue& tensors);
void forgetAll(c10::ArrayRef<c10::IValue> values);

// Forgets the values of these elements only. The rest of their storages does not change.
void forgetElements(const c10::IValue& tensors);

}  // namespace torchext
