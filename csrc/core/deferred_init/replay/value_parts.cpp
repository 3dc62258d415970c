#include "value_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include <ATen/ops/clone.h>
#include <c10/util/irange.h>

#include "../../support/sizes.h"

namespace torchext {

using c10::Storage;

namespace {

void copyBytes(
    const Storage& to, std::int64_t to_byte, const Storage& from, std::int64_t from_byte, std::int64_t count) {
  if (to.device().is_cpu()) {
    std::memcpy(static_cast<std::byte*>(to.mutable_data()) + to_byte,
                static_cast<const std::byte*>(from.data()) + from_byte, toSize(count));
    return;
  }
  const auto bytes = [count](const Storage& storage, std::int64_t begin) {
    return bytesAt(storage, toSize(begin), toSize(count));
  };
  bytes(to, to_byte).copy_(bytes(from, from_byte));
}

}  // namespace

bool Part::contains(const Geometry& geometry) const {
  const auto needed = box ? box->grid().boxOf(geometry) : std::nullopt;
  return !needed || box->contains(*needed);
}

Geometry shownIn(const Part& part, const Geometry& geometry) {
  return part.box ? part.box->shown(geometry) : geometry;
}

at::Tensor tensorIn(const Part& part, const Geometry& geometry) {
  TORCH_INTERNAL_ASSERT(part.contains(geometry));
  return shownIn(part, geometry).makeTensor(part.storage);
}

bool hasRecordedLayout(const Part& part, const Geometry& geometry) {
  const Geometry shown = shownIn(part, geometry);
  const auto distance = (shown.storage_offset - geometry.storage_offset) * toSigned(geometry.dtype.itemsize());
  return shown.strides == geometry.strides && distance % kMemoryAlignment == 0;
}

// The copy covers the bytes from the first to the last element that the strides reach.
at::Tensor alignedCopyOf(const Part& part, const Geometry& geometry) {
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  Geometry aligned = geometry;
  aligned.storage_offset = geometry.storage_offset * itemsize % kMemoryAlignment / itemsize;
  // Elements that a dimension of stride 0 repeats are copied once.
  std::vector<at::Tensor> sides{tensorIn(part, geometry), aligned.makeEmptyTensor(part.storage.device())};
  const at::Tensor copy = sides.back();
  for (const auto i : c10::irange(geometry.sizes.size())) {
    if (geometry.strides[i] == 0 && geometry.sizes[i] > 1) {
      for (at::Tensor& side : sides) {
        side = side.narrow(toSigned(i), 0, 1);
      }
    }
  }
  sides.back().copy_(sides.front());
  return copy;
}

Storage copyOf(const Storage& storage) {
  return bytesAt(storage, 0, storage.nbytes()).clone().storage();
}

Part cutOut(const Part& part, const Box& box) {
  Storage cut = makeStorage(box.packedBytes(), part.storage.device());
  const auto size = toSigned(part.storage.nbytes());
  box.forEachRun([&](std::int64_t begin, std::int64_t packed, std::int64_t length) {
    const std::int64_t from = part.box ? part.box->placeOf(begin) : begin;
    const std::int64_t count = std::min(length, size - from);  // a last row may be incomplete
    if (count > 0) {
      copyBytes(cut, packed, part.storage, from, count);
    }
  });
  return {std::move(cut), box};
}

}  // namespace torchext
