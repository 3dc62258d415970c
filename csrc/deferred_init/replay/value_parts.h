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
  // Which they are. Nothing if they are all, in their own places.
  std::optional<Box> box;

  bool contains(const Geometry& geometry) const;

  bool contains(const Box& other) const {
    return !box || box->contains(other);
  }
};

using Parts = std::vector<Part>;

// The one of `parts` that has all of `needed`: a tensor of the storage, or a box. There must be one.
template <typename Needed>
const Part& partWith(const Parts& parts, const Needed& needed) {
  const auto part =
      std::find_if(parts.begin(), parts.end(), [&needed](const Part& one) { return one.contains(needed); });
  TORCH_INTERNAL_ASSERT(part != parts.end(), "No part of a value has what is needed of it.");
  return *part;
}

// What the tensor `geometry` of the storage is in a part that has it all.
Geometry shownIn(const Part& part, const Geometry& geometry);
at::Tensor tensorIn(const Part& part, const Geometry& geometry);

// Returns true if that tensor has the strides that it has in the storage, and memory that is as aligned.
bool isSeenAlike(const Part& part, const Geometry& geometry);

// A copy of the tensor that is seen alike.
at::Tensor alignedCopyOf(const Part& part, const Geometry& geometry);

c10::Storage copyOf(const c10::Storage& storage);

// A copy of the bytes of `box`, all of which the part has.
Part cutOut(const Part& part, const Box& box);

}  // namespace torchext
