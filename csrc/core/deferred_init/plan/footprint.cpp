#include "footprint.h"

#include <algorithm>
#include <cstddef>
#include <optional>

#include <c10/util/irange.h>

#include "../../../libraries/support/stack_utils.h"
#include "../../fake/calls/op_traits.h"

namespace torchext {

namespace {

std::optional<ByteSet> bytesOf(const Geometry& geometry) {
  return ByteSet::ofElements(geometry.sizes, geometry.strides, geometry.storage_offset, geometry.dtype.itemsize());
}

// Returns the geometry of a written argument after the call, or null if it is unknown. An `out` may get another shape,
// and then shows bytes that it did not show before: `add(a, b, out=t[:0])`.
const Geometry* geometryAfter(const OpNode& node, std::size_t tensor, std::size_t argument) {
  if (const WrittenStorage* written = node.writtenTo(tensor)) {
    return &written->geometry();
  }
  // If several tensors share a storage, only the first is listed as written.
  const bool may_change = node.op().schema().arguments()[argument].is_out() || node.op().hasTag(at::Tag::inplace_view);
  return may_change ? nullptr : &node.tensors()[tensor].geometry();
}

Footprint footprintOf(const OpNode& node, std::size_t tensor, std::size_t argument) {
  const StorageValue& value = *node.tensors()[tensor].value;
  const Geometry& geometry = node.tensors()[tensor].geometry();
  const ByteSet whole = wholeOf(value);
  const std::optional<ByteSet> own = bytesOf(geometry);
  const bool goes_beyond = reachesBeyondElements(node.op());
  Footprint footprint;
  footprint.reads = goes_beyond ? whole : own.value_or(whole);
  if (!writesArgument(node.op(), node.arguments(), argument)) {
    return footprint;
  }
  footprint.writes = footprint.reads;
  const Geometry* after = geometryAfter(node, tensor, argument);
  const bool is_kept = after != nullptr && *after == geometry;
  if (!is_kept) {
    footprint.writes.add(after == nullptr ? whole : bytesOf(*after).value_or(whole));
  } else if (own && !goes_beyond && overwritesArgument(node.op(), argument)) {
    footprint.overwrites = *own;
    footprint.reads = {};
  }
  return footprint;
}

}  // namespace

ByteSet wholeOf(const StorageValue& value) {
  return {0, std::max(value.nbytes(), std::size_t{1})};
}

std::vector<Footprint> footprintsOf(const OpNode& node) {
  std::vector<Footprint> footprints;
  footprints.reserve(node.tensors().size());
  for (const auto argument : c10::irange(node.arguments().size())) {
    forEachTensor(node.arguments()[argument], [&](const at::Tensor& /*placeholder*/) {
      const std::size_t tensor = footprints.size();
      const bool is_recorded = node.tensors()[tensor].value != nullptr;
      footprints.push_back(is_recorded ? footprintOf(node, tensor, argument) : Footprint{});
    });
  }
  return footprints;
}

}  // namespace torchext
