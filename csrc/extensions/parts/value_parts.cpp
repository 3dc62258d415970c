#include "value_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include <ATen/ops/clone.h>
#include <c10/util/irange.h>

#include "../../libraries/support/sizes.h"

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

Geometry shownIn(const Part& part, const Geometry& geometry) {
  return part.box ? part.box->shown(geometry) : geometry;
}

// Returns true if the tensor has the same strides as in the storage, and memory of the same alignment.
bool hasRecordedLayout(const Part& part, const Geometry& geometry) {
  const Geometry shown = shownIn(part, geometry);
  const auto distance = (shown.storage_offset - geometry.storage_offset) * toSigned(geometry.dtype.itemsize());
  return shown.strides == geometry.strides && distance % kMemoryAlignment == 0;
}

// Returns a copy of the tensor with the strides and alignment of the storage. It covers the bytes from the first to the
// last element that the strides reach.
at::Tensor alignedCopyOf(const Part& part, const Geometry& geometry) {
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  Geometry aligned = geometry;
  aligned.storage_offset = geometry.storage_offset * itemsize % kMemoryAlignment / itemsize;
  // Elements that a dimension of stride 0 repeats are copied once.
  std::vector<at::Tensor> sides{part.tensor(geometry), aligned.makeEmptyTensor(part.storage.device())};
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

// Returns a copy of the bytes of `box`, which the part must contain.
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

// Returns the one of `parts` for which `contains` is true. There must be one.
template <typename Contains>
const Part& partThat(const std::vector<Part>& parts, const Contains& contains) {
  const auto part = std::find_if(parts.begin(), parts.end(), contains);
  TORCH_INTERNAL_ASSERT(part != parts.end(), "No part of a value contains the needed bytes.");
  return *part;
}

// Returns the part of a value that contains `box`.
Part partWith(const ValueMemory& memory, const Box& box) {
  if (!memory.parts) {
    return {memory.whole, std::nullopt};
  }
  return partThat(static_cast<const BoxesMemory&>(*memory.parts).parts(),
                  [&box](const Part& part) { return part.box->contains(box); });
}

}  // namespace

// ---- Memory ----

bool Part::contains(const Geometry& geometry) const {
  const auto needed = box ? box->grid().boxOf(geometry) : std::nullopt;
  return !needed || box->contains(*needed);
}

at::Tensor Part::tensor(const Geometry& geometry) const {
  TORCH_INTERNAL_ASSERT(contains(geometry));
  return shownIn(*this, geometry).makeTensor(storage);
}

at::Tensor BoxesMemory::tensorFor(PartRule reader, const Geometry& geometry, bool is_written) const {
  if (parts_.empty()) {  // a tensor without elements needs no part
    return geometry.makeEmptyTensor(device_);
  }
  const Part& part = partThat(parts_, [&geometry](const Part& one) { return one.contains(geometry); });
  if (reader != PartRule::kNone || hasRecordedLayout(part, geometry)) {
    return part.tensor(geometry);
  }
  if (is_written) {
    throw PartsDiffer{};
  }
  return alignedCopyOf(part, geometry);
}

const Storage& BoxesMemory::only() const {
  TORCH_INTERNAL_ASSERT(parts_.size() == 1);
  return parts_.front().storage;
}

// ---- Boxes ----

bool Boxes::areNone() const noexcept {
  return boxes_.empty();
}

std::size_t Boxes::nbytes() const {
  return std::accumulate(boxes_.begin(), boxes_.end(), std::size_t{0},
                         [](std::size_t sum, const Box& box) { return sum + box.packedBytes(); });
}

bool Boxes::areAmong(const ValueParts& others) const {
  const auto& among = boxesOf(others);
  return std::all_of(boxes_.begin(), boxes_.end(), [&among](const Box& box) {
    const auto found =
        std::find_if(among.begin(), among.end(), [&box](const Box& other) { return other.contains(box); });
    return found != among.end() && box.contains(*found);
  });
}

bool Boxes::areOnlyPart(const Geometry& geometry, const Geometry& shown) const {
  if (boxes_.size() != 1) {
    return false;
  }
  const Box& box = boxes_.front();
  const auto needed = box.grid().boxOf(geometry);
  return (!needed || box.contains(*needed)) && box.shown(geometry) == shown;
}

template <typename MakePart>
std::shared_ptr<const PartsMemory> Boxes::memoryOf(const MakePart& make_part) const {
  std::vector<Part> parts;
  parts.reserve(boxes_.size());
  std::transform(boxes_.begin(), boxes_.end(), std::back_inserter(parts), make_part);
  return std::make_shared<BoxesMemory>(std::move(parts), device_);
}

std::shared_ptr<const PartsMemory> Boxes::makeMemory() const {
  return memoryOf([this](const Box& box) { return Part{makeStorage(box.packedBytes(), device_), box}; });
}

std::shared_ptr<const PartsMemory> Boxes::inPlace(const ValueMemory& before) const {
  TORCH_INTERNAL_ASSERT(before.parts != nullptr, "The whole of a value is not the memory of its parts.");
  return memoryOf([&before](const Box& box) { return partWith(before, box); });
}

std::shared_ptr<const PartsMemory> Boxes::copyOf(const ValueMemory& before) const {
  return memoryOf([&before](const Box& box) { return cutOut(partWith(before, box), box); });
}

const std::vector<Box>& boxesOf(const ValueParts& parts) {
  return static_cast<const Boxes&>(parts).boxes();
}

}  // namespace torchext
