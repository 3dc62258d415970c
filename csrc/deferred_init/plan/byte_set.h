#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Some of the bytes of a storage.
class ByteSet {
 public:
  ByteSet() = default;

  // Those in [begin, end).
  ByteSet(std::size_t begin, std::size_t end);

  // Those of a tensor's elements. Nothing when they are too scattered for the answer to be worth its cost.
  static std::optional<ByteSet> ofElements(c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides,
                                           int64_t storage_offset,
                                           std::size_t itemsize);

  bool isEmpty() const noexcept {
    return runs_.empty();
  }

  // How many runs of neighbouring bytes it has. All operations take a time of the order of those of both sets.
  std::size_t countRuns() const noexcept {
    return runs_.size();
  }

  void add(const ByteSet& other);
  void remove(const ByteSet& other);

  bool overlaps(const ByteSet& other) const;

 private:
  using Run = std::pair<std::size_t, std::size_t>;

  // Of runs in order, which may touch or overlap.
  static ByteSet joined(const std::vector<Run>& runs);

  // Each not empty, in order, and with bytes in between that are not in the set.
  std::vector<Run> runs_;
};

}  // namespace torchext
