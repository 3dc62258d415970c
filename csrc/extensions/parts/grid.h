#pragma once

// NOTE [Parts of storages]
//
// A program that needs only a part of a value, such as a shard, should pay only for that part. A part is a box on a
// *grid*: several indices number the bytes of a storage, like those of a multidimensional array, and a box is a
// range of each index, maybe with a step. The grid of a storage consists of the strides of all tensors that the
// program has shown it with, where each stride divides the next larger one. For a matrix these are the rows, the
// elements of a row, and the heads if its rows were also viewed as heads. So rows, columns, blocks, every n-th row
// and their transposes are boxes. For any other tensor, the smallest enclosing box is used.
//
// The bytes of a box are stored contiguously, in the order of their addresses, and the first one has the same alignment
// as in the storage. A tensor within the box has the same elements there, with other strides and another offset.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../libraries/support/sizes.h"

namespace torchext {

// The indices `first`, `first + step`, and so on, below `last`. If the range is not empty, `last - 1` is its last
// index.
struct IndexRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t step = 1;

  std::int64_t count() const noexcept {
    return (last - first + step - 1) / step;
  }
};

// A range of each dimension of a tensor.
using IndexRanges = std::vector<IndexRange>;

// Returns the indices of `range` in [begin, end).
IndexRange within(const IndexRange& range, std::int64_t begin, std::int64_t end);

// Returns the elements of the tensor in `ranges`.
Geometry narrowed(const Geometry& geometry, const IndexRanges& ranges);
at::Tensor narrowed(const at::Tensor& tensor, const IndexRanges& ranges);

// The alignment of storages that PyTorch allocates, in bytes. Kernels may depend on it.
constexpr std::int64_t kMemoryAlignment = 64;

class Grid;

// A range of each index of a grid. No range is empty.
class Box {
 public:
  Box(std::shared_ptr<const Grid> grid, IndexRanges ranges) : grid_{std::move(grid)}, ranges_{std::move(ranges)} {}

  const Grid& grid() const noexcept {
    return *grid_;
  }
  const IndexRanges& ranges() const noexcept {
    return ranges_;
  }

  // The number of its bytes. Some of the last may lie beyond the end of the storage.
  std::size_t nbytes() const;

  // The size of a storage for these bytes.
  std::size_t packedBytes() const {
    return toSize(lead()) + nbytes();
  }

  bool contains(const Box& other) const;
  // Returns true if the ranges overlap. Boxes with steps may then have no byte in common.
  bool overlaps(const Box& other) const;

  // Returns the smallest box around both.
  Box with(const Box& other) const;

  // Returns the smallest box around this one in which each tensor of this one keeps its strides.
  Box keepingStrides() const;

  // Returns the smallest box around this one whose ranges have no steps.
  Box withoutSteps() const;

  // Returns the smallest box around this one that does not split elements of `itemsize` bytes.
  Box withWholeElements(std::size_t itemsize) const;

  // Returns the geometry, in a storage of the box's bytes, of a tensor of the storage whose elements are all in the
  // box.
  Geometry shown(const Geometry& geometry) const;

  // Returns the elements of the tensor `geometry` that are in the box, and maybe more; nothing if there are no such
  // elements. Widens the box to hold all of them.
  TORCHEXT_API std::optional<IndexRanges> widenToElementsOf(const Geometry& geometry);

  // Returns the position, in a storage of the box's bytes, of the byte at `byte` of the storage.
  std::int64_t placeOf(std::int64_t byte) const;

  // Calls `visit` for each run of adjacent bytes, in address order, with its beginning in the storage, its beginning in
  // a storage of the box's bytes, and its length.
  using VisitRun = c10::function_ref<void(std::int64_t begin, std::int64_t packed, std::int64_t length)>;
  void forEachRun(VisitRun visit) const;

 private:
  std::int64_t lead() const;
  // The stride of each index in a storage of the box's bytes.
  std::vector<std::int64_t> packedStrides() const;
  std::optional<IndexRanges> elementsOf(const Geometry& geometry) const;

  std::shared_ptr<const Grid> grid_;
  IndexRanges ranges_;
};

class Grid : public std::enable_shared_from_this<Grid> {
 public:
  // Returns a grid for a storage of `nbytes` bytes and for `tensors` on it. Where strides do not divide each other, the
  // first ones win.
  static std::shared_ptr<const Grid> of(std::size_t nbytes, const std::vector<const Geometry*>& tensors);

  // Returns the box of the whole storage.
  Box whole() const;

  // Returns the smallest box around the elements of a tensor, or nothing if it has no elements. Includes the
  // bytes that short steps skip.
  std::optional<Box> boxOf(const Geometry& geometry) const;

  std::size_t storageBytes() const noexcept {
    return nbytes_;
  }

 private:
  friend class Box;

  // A stride in bytes, and how many of it make the next larger stride, or the storage.
  struct Level {
    std::int64_t stride;
    std::int64_t count;
  };

  // A dimension of a tensor: `count` elements, each `steps` indices of a level after the previous one.
  struct Steps {
    std::size_t level;
    std::int64_t steps;
    std::int64_t count;
  };

  Grid(std::size_t nbytes, std::vector<Level> levels) : nbytes_{nbytes}, levels_{std::move(levels)} {}

  // Returns the indices of a byte.
  std::vector<std::int64_t> indicesOf(std::int64_t byte) const;
  // Returns `step`, or 1 if it is short.
  std::int64_t stepOn(std::size_t level, std::int64_t step) const;
  Steps stepsOf(std::int64_t stride, std::int64_t count) const;
  // Returns the steps of the dimensions of a tensor, and those of the bytes of an element.
  std::vector<Steps> stepsOf(const Geometry& geometry) const;

  std::size_t nbytes_;
  // Sorted by stride, the largest first.
  std::vector<Level> levels_;
};

// ---- Boxes of values ----

// Some bytes of a value, in memory.
struct Part {
  c10::Storage storage;
  // The bytes that it holds. Nothing for the whole storage, unmoved.
  std::optional<Box> box;

  bool contains(const Geometry& geometry) const;

  // Returns the tensor `geometry` of the storage, which the part must contain.
  at::Tensor tensor(const Geometry& geometry) const;
};

class BoxesMemory final : public PartsMemory {
 public:
  BoxesMemory(std::vector<Part> parts, c10::Device device) : parts_{std::move(parts)}, device_{device} {}

  const std::vector<Part>& parts() const noexcept {
    return parts_;
  }

  at::Tensor tensorFor(PartRule reader, const Geometry& geometry, bool is_written) const override;
  const c10::Storage& only() const override;

 private:
  std::vector<Part> parts_;
  c10::Device device_;
};

class Boxes final : public ValueParts {
 public:
  // `device` is that of the storage when it was recorded.
  Boxes(std::vector<Box> boxes, c10::Device device) : boxes_{std::move(boxes)}, device_{device} {}

  const std::vector<Box>& boxes() const noexcept {
    return boxes_;
  }

  bool areNone() const noexcept override;
  std::size_t nbytes() const override;
  bool areAmong(const ValueParts& others) const override;
  bool areOnlyPart(const Geometry& geometry, const Geometry& shown) const override;
  std::shared_ptr<const PartsMemory> makeMemory() const override;
  std::shared_ptr<const PartsMemory> inPlace(const ValueMemory& before) const override;
  std::shared_ptr<const PartsMemory> copyOf(const ValueMemory& before) const override;

 private:
  std::shared_ptr<const PartsMemory> memoryOf(c10::function_ref<Part(const Box&)> make_part) const;

  std::vector<Box> boxes_;
  c10::Device device_;
};

// Returns the boxes of parts that are not all of a value.
TORCHEXT_API const std::vector<Box>& boxesOf(const ValueParts& parts);

}  // namespace torchext
