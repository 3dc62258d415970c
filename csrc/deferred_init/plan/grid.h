#pragma once

// NOTE [Parts of storages]
//
// Who asks for a part of a value, as a shard does, is to pay for that part. A part is a box on a *grid*: the bytes of a
// storage are numbered by several indices, as those of an array of several dimensions are, and a box has a range of
// each. The grid of a storage is made of the strides of all tensors that the program has shown it with, each of which
// divides the next larger one: of a matrix the rows, the elements in a row, and where its rows were also seen as heads,
// these. So rows, columns, blocks and transposes of those are boxes, and of any other tensor the smallest box around it
// is taken.
//
// The bytes of a box are kept one after the other, in the order of their addresses, and the first of them as aligned as
// in the storage. A tensor within the box shows them with other strides and another offset, and with the same elements.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../graph/op_graph.h"

namespace torchext {

// [first, second)
using IndexRange = std::pair<std::int64_t, std::int64_t>;

// A range of each dimension of a tensor.
using IndexRanges = std::vector<IndexRange>;

// The elements of the tensor in `ranges`.
Geometry narrowed(const Geometry& geometry, const IndexRanges& ranges);
at::Tensor narrowed(const at::Tensor& tensor, const IndexRanges& ranges);

// How PyTorch aligns the memory of storages, in bytes. Kernels may depend on it.
constexpr std::int64_t kMemoryAlignment = 64;

class Grid;

// A range of each index of a grid. None is empty.
class Box {
 public:
  Box(std::shared_ptr<const Grid> grid, IndexRanges ranges) : grid_{std::move(grid)}, ranges_{std::move(ranges)} {}

  const Grid& grid() const noexcept {
    return *grid_;
  }
  const IndexRanges& ranges() const noexcept {
    return ranges_;
  }

  // How many bytes it has. Some of the last may lie behind the end of the storage.
  std::size_t nbytes() const;

  // How many bytes a storage has for them.
  std::size_t packedBytes() const {
    return static_cast<std::size_t>(lead()) + nbytes();
  }

  bool contains(const Box& other) const;
  bool overlaps(const Box& other) const;

  // The smallest box around both.
  Box with(const Box& other) const;

  // The smallest box around this one in whose bytes each tensor of this one has the strides that it has in the storage.
  Box keepingStrides() const;

  // The smallest box around this one that has no parts of elements of `itemsize` bytes.
  Box withWholeElements(std::size_t itemsize) const;

  // What the tensor `geometry` of the storage, all of whose elements are in the box, is in a storage of its bytes.
  Geometry shown(const Geometry& geometry) const;

  // The elements of the tensor `geometry` that are in the box, and maybe more, or nothing if there are none. The box is
  // widened to hold them all.
  std::optional<IndexRanges> take(const Geometry& geometry);

  // Where the byte at `byte` of the storage is in a storage of the bytes of the box.
  std::int64_t placeOf(std::int64_t byte) const;

  // Calls `visit` for each stretch of neighbouring bytes, in the order of their addresses, with where it begins in the
  // storage and in that of the bytes of the box, and its length.
  template <typename Visit>
  void forEachRun(const Visit& visit) const;

 private:
  std::int64_t lead() const;
  // Of each index, in a storage of the bytes of the box.
  std::vector<std::int64_t> packedStrides() const;
  std::optional<IndexRanges> elementsOf(const Geometry& geometry) const;

  std::shared_ptr<const Grid> grid_;
  IndexRanges ranges_;
};

class Grid : public std::enable_shared_from_this<Grid> {
 public:
  // One for a storage of `nbytes` bytes and for `tensors` on it. Where strides do not divide each other, those of the
  // first tensors are taken.
  static std::shared_ptr<const Grid> of(std::size_t nbytes, const std::vector<const Geometry*>& tensors);

  // The whole storage.
  Box whole() const;

  // The smallest box around the elements of a tensor, or nothing if it has none.
  std::optional<Box> boxOf(const Geometry& geometry) const;

  std::size_t storageBytes() const noexcept {
    return nbytes_;
  }

 private:
  friend class Box;

  // A stride in bytes, and how many of them make the next larger one, or the storage.
  struct Level {
    std::int64_t stride;
    std::int64_t count;
  };

  // A dimension of a tensor: `count` elements, each `steps` indices of a level after the one before.
  struct Steps {
    std::size_t level;
    std::int64_t steps;
    std::int64_t count;
  };

  Grid(std::size_t nbytes, std::vector<Level> levels) : nbytes_{nbytes}, levels_{std::move(levels)} {}

  // What numbers a byte.
  std::vector<std::int64_t> indicesOf(std::int64_t byte) const;
  Steps stepsOf(std::int64_t stride, std::int64_t count) const;
  // Of the dimensions of a tensor, and of the bytes of its elements.
  std::vector<Steps> stepsOf(const Geometry& geometry) const;

  std::size_t nbytes_;
  // The largest stride first.
  std::vector<Level> levels_;
};

template <typename Visit>
void Box::forEachRun(const Visit& visit) const {
  const auto& levels = grid_->levels_;
  // What is whole is one stretch with what lies around it.
  std::size_t inner = levels.size() - 1;
  while (inner > 0 && ranges_[inner].first == 0 && ranges_[inner].second == levels[inner].count) {
    --inner;
  }
  const auto [first, last] = ranges_[inner];
  const std::int64_t length = (last - first) * levels[inner].stride;
  std::vector<std::int64_t> at;
  for (std::size_t i = 0; i < inner; ++i) {
    at.push_back(ranges_[i].first);
  }
  std::int64_t packed = lead();
  while (true) {
    std::int64_t begin = first * levels[inner].stride;
    for (std::size_t i = 0; i < inner; ++i) {
      begin += at[i] * levels[i].stride;
    }
    visit(begin, packed, length);
    packed += length;
    std::size_t next = inner;
    while (next > 0 && ++at[next - 1] == ranges_[next - 1].second) {
      at[next - 1] = ranges_[next - 1].first;
      --next;
    }
    if (next == 0) {
      return;
    }
  }
}

}  // namespace torchext
