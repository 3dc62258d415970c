#pragma once

// NOTE [Smaller calls]
//
// A call that is too large for a trial is tried out with smaller numbers. It must pass, fail and lay out its results as
// the original call does, so the numbers keep their relations:
//
//   * Equal numbers stay equal, and a larger number stays larger: a size of 128 and an `output_size` of 64 must not
//     both become 64. Also, of two dimensions with equal strides, the shorter one counts as the inner one
//     (`TensorIteratorBase::reorder_dimensions()`).
//   * A multiple of another number stays a multiple, and other numbers do not become multiples.
//   * Even numbers stay even.
//   * Numbers with a small difference keep it, and others differ by more: a diagonal of 209 elements fits into a matrix
//     of 211, from `offset=2` on, and one of 183 does not.
//
// Dividing all large sizes by a power of two also keeps sums and products, so it is tried first. Otherwise each large
// number becomes the smallest one that has these relations to those before it. Sums and products are lost then, and a
// call that fails for that reason is tried out at its own size.

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace torchext {

class SizeScale {
 public:
  // Keeps all numbers.
  SizeScale() = default;

  // Divides multiples of `divisor`, and replaces other large numbers. Returns nothing if a relation would change.
  // `numbers` are the distinct numbers of the call in ascending order.
  static std::optional<SizeScale> dividing(c10::ArrayRef<int64_t> numbers, int64_t divisor);

  // Replaces the numbers that are larger than `kept`, which must be at least `kLeastKept`.
  static SizeScale compressing(c10::ArrayRef<int64_t> numbers, int64_t kept);
  static constexpr int64_t kLeastKept = 8;  // numbers up to this one may be dimensions

  // Returns the image of `number`.
  int64_t of(int64_t number) const;

  bool keepsAll() const noexcept {
    return images_.empty();
  }

 private:
  bool keepsRelations(int64_t number, int64_t image) const;
  int64_t smallestLike(int64_t number, int64_t least) const;

  std::vector<std::pair<int64_t, int64_t>> images_;  // in ascending order
};

}  // namespace torchext
