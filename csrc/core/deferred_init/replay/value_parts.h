#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../plan/grid.h"

namespace torchext {

// Some bytes of a value, in memory.
struct Part {
  c10::Storage storage;
  // The bytes that it holds. Nothing for the whole storage, unmoved.
  std::optional<Box> box;

  bool contains(const Geometry& geometry) const;

  bool contains(const Box& other) const {
    return !box || box->contains(other);
  }
};

using Parts = std::vector<Part>;

// Returns the one of `parts` that contains `needed`, a tensor of the storage or a box. There must be one.
template <typename Needed>
const Part& partWith(const Parts& parts, const Needed& needed) {
  const auto part =
      std::find_if(parts.begin(), parts.end(), [&needed](const Part& one) { return one.contains(needed); });
  TORCH_INTERNAL_ASSERT(part != parts.end(), "No part of a value contains the needed bytes.");
  return *part;
}

// Return the geometry, in a part, of a tensor of the storage that the part contains, and the tensor itself.
Geometry shownIn(const Part& part, const Geometry& geometry);
at::Tensor tensorIn(const Part& part, const Geometry& geometry);

// Returns true if that tensor has the same strides as in the storage, and memory of the same alignment.
bool hasRecordedLayout(const Part& part, const Geometry& geometry);

// Returns a copy of the tensor with the strides and alignment of the storage.
at::Tensor alignedCopyOf(const Part& part, const Geometry& geometry);

c10::Storage copyOf(const c10::Storage& storage);

// Returns a copy of the bytes of `box`, which the part must contain.
Part cutOut(const Part& part, const Box& box);

}  // namespace torchext
