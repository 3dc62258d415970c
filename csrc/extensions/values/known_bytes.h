#pragma once

// The known bytes of fake storages: NOTE [Known values], NOTE [Assumed values]. Functions may be called
// from several threads. As with real memory, callers must order concurrent writes to the same tensor.

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
constexpr std::size_t kFewBytes = 1024;                             // except for storages of at most this size

// The same for values that depend on a policy for routing: the tokens of each expert are counted exactly.
constexpr std::size_t kMaxRoutedBytes = std::size_t{1} << 30;
constexpr std::size_t kMaxRoutedBytesOfAll = std::size_t{4} << 30;

// Origins of values. For assumed values also their policies: NOTE [Assumed values]. Kinds are combined with `|`. The
// kinds from kByLine on are those of policies for source lines.
enum class ValueKind : std::uint8_t { kKnown = 0, kAssumed = 1, kByMasks = 3, kByRouting = 5, kByLine = 9 };
constexpr unsigned kAllKinds = 0x7f;

constexpr ValueKind operator|(ValueKind a, ValueKind b) noexcept {
  return static_cast<ValueKind>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}

// Returns true if values depend on a policy for routing or for a line.
constexpr bool isRouted(ValueKind kind) noexcept {
  return static_cast<unsigned>(kind) > static_cast<unsigned>(ValueKind::kByMasks);
}

// Returns true if the storage of `tensor` and its elements are small enough for values, or has large routed ones.
// Cheap.
bool isSmall(const at::Tensor& tensor) noexcept;

// Returns true if `tensor` is small enough for routed values.
bool isSmallForRouting(const at::Tensor& tensor) noexcept;

// Returns true if all tensors in `values` are small.
bool areSmall(c10::ArrayRef<c10::IValue> values);

// Returns true if the storage of `fake` has known or assumed values, including those of setElements(). Takes the lock
// of the storages if there may be some.
bool hasValue(const at::Tensor& fake) noexcept;

// Returns the combined kinds of the values of `fake`, including those of setElements(), or kKnown without values.
ValueKind kindOf(const at::Tensor& fake);

// Returns a real CPU tensor that shares the memory of the values of `tensor`, or an undefined one if there are no
// values. Includes assumed values if `accepted` does. A real CPU tensor is returned unchanged.
TORCHEXT_API at::Tensor valueOf(const at::Tensor& tensor, ValueKind accepted = ValueKind::kKnown);

// Copies the known bytes of `source` and their kinds to the storage of its copy `fake`. `source` is real and on the CPU
// or of one element, or a fake with known or assumed values. Does nothing if `fake` has values.
TORCHEXT_API void copyValue(const at::Tensor& fake, const at::Tensor& source);

// Gives `fake`, the only tensor on its storage, the values of `value`. Does nothing if they are too many.
void setValue(const at::Tensor& fake, const at::Tensor& value, ValueKind kind);

// Returns true if the elements of `fake` are all of its storage, each once.
bool coversStorage(const at::Tensor& fake);

// Makes the new tensor `fake` share the memory of `real`, to which others may write, as its values. Does nothing if
// they are too many.
void shareBytes(const at::Tensor& fake, const at::Tensor& real);

// Sets each element of `fake`, which must cover its storage, to zero or one. Allocates memory only when these are read.
void setFill(const at::Tensor& fake, bool value);

// Gives `fake`, the result of `arange()`, its values. Integers allocate memory only when they are read. Others are
// computed at once, because they depend on the number of threads.
void setRange(const at::Tensor& fake, const at::Scalar& start, const at::Scalar& end, const at::Scalar& step);

// Returns true if values written to `fake`, a part of its storage, can be known: the storage contains integers, or has
// bytes. The rest does not change.
bool canKnowPart(const at::Tensor& fake);

// Makes the elements of `fake`, which may be a part of its storage, values of `kind`, so that they can be written.
// Elements without values become zero. The rest of the storage does not change: unknown values remain unknown. Returns
// false if values cannot be kept for `fake`, or would be too many.
bool makePart(const at::Tensor& fake, ValueKind kind);

// A tensor with values for some of its elements.
struct KnownParts {
  at::Tensor values;
  at::Tensor written;  // truth values: which elements have a value
};

// Returns the values of `fake` if some elements have values, but not all. Includes assumed values if `accepted` does.
TORCHEXT_API std::optional<KnownParts> partsOf(const at::Tensor& fake, ValueKind accepted = ValueKind::kKnown);

// Returns `rest`, a real tensor with the sizes and dtype of `fake`, with the existing values of `fake` in it.
at::Tensor withParts(const at::Tensor& fake, const at::Tensor& rest);

// Marks the values of `fake` as assumed after assumed values were written to it. Elements without values remain
// unknown.
void markAssumed(const at::Tensor& fake, ValueKind kind);

// Returns a new contiguous tensor of `sizes` that repeats the elements of the real tensor `pattern`.
at::Tensor repeated(const at::Tensor& pattern, c10::IntArrayRef sizes);

// Assumes that the elements of `fake`, regardless of their number, repeat those of the real tensor `pattern`.
void setElements(const at::Tensor& fake, const at::Tensor& pattern, ValueKind kind);

// Returns the pattern that setElements() has set for a large tensor, a vector, or an undefined tensor.
at::Tensor elementsOf(const at::Tensor& fake);

// Removes the values of `fakes`, because other code has written to them.
void forgetValues(c10::ArrayRef<c10::IValue> fakes);

// Removes only the values of these elements. The rest of their storages does not change.
void forgetElements(const c10::IValue& tensors);

}  // namespace torchext
