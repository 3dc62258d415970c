#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

namespace torchext {

// A set of bytes of a storage.
class ByteSet {
 public:
  ByteSet() = default;

  // The bytes in [begin, end).
  ByteSet(std::size_t begin, std::size_t end);

  // Returns the bytes of a tensor's elements, or nothing if they form too many runs.
  static std::optional<ByteSet> ofElements(c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides,
                                           int64_t storage_offset,
                                           std::size_t itemsize);

  bool isEmpty() const noexcept {
    return runs_.empty();
  }

  // The number of runs of adjacent bytes. All operations take time linear in the runs of both sets.
  std::size_t countRuns() const noexcept {
    return runs_.size();
  }

  void add(const ByteSet& other);
  void remove(const ByteSet& other);

  bool overlaps(const ByteSet& other) const;

 private:
  using Run = std::pair<std::size_t, std::size_t>;

  // Makes a set of runs in order, which may touch or overlap.
  static ByteSet joined(c10::ArrayRef<Run> runs);

  // Not empty, in order, separated by bytes that are not in the set. Mostly one.
  c10::SmallVector<Run, 1> runs_;
};

}  // namespace torchext
