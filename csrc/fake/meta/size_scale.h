#pragma once

// NOTE [Smaller calls]
//
// A call that is too large to be tried out is tried out with smaller numbers. It must pass, fail and lay out its
// results as the call that it stands for, so the numbers keep their relations:
//
//   * equal numbers stay equal, and a larger one stays larger: a size of 128 and an `output_size` of 64 must not both
//     become 64, and of two dimensions with equal strides, the shorter one counts as the inner one
//     (`TensorIteratorBase::reorder_dimensions()`);
//   * a multiple of another number stays one, and a number that is not a multiple does not become one;
//   * even numbers stay even;
//   * numbers that differ by little keep their difference, and others differ by more: a diagonal of 209 elements fits
//     into a matrix of 211, from `offset=2` on, and one of 183 does not.
//
// Dividing all large sizes by a power of two keeps sums and products as well, so it comes first. Otherwise each large
// number becomes the smallest one that has these relations to those before it. Sums and products are lost then; a
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
  // `numbers` are those of the call, in ascending order and each once.
  static std::optional<SizeScale> dividing(c10::ArrayRef<int64_t> numbers, int64_t divisor);

  // Replaces the numbers that are larger than `kept`, which is at least `kLeastKept`.
  static SizeScale compressing(c10::ArrayRef<int64_t> numbers, int64_t kept);
  static constexpr int64_t kLeastKept = 8;  // numbers up to this one may be dimensions

  // Returns the number that stands for `number`.
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
