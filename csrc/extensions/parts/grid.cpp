#include "grid.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include <c10/util/irange.h>

#include "../../libraries/support/sizes.h"

namespace torchext {

using c10::Storage;

namespace {

// Returns the numbers i below `count` for which `first + i * steps` is in `range`, and maybe more.
IndexRange movingWithin(const IndexRange& range, std::int64_t first, std::int64_t steps, std::int64_t count) {
  // Returns the first number that reaches `index`.
  const auto reach = [&](std::int64_t index) {
    return std::min((std::max<std::int64_t>(index - first, 0) + steps - 1) / steps, count);
  };
  if ((range.first - first) % std::gcd(range.step, steps) != 0) {
    return {};
  }
  if (range.step % steps != 0 || (range.first - first) % steps != 0) {
    return {reach(range.first), reach(range.last)};
  }
  // The numbers are multiples of `range.step / steps` apart.
  const std::int64_t step = range.step / steps;
  std::int64_t begin = (range.first - first) / steps;
  begin += begin < 0 ? (-begin + step - 1) / step * step : 0;
  return within({begin, (range.last - 1 - first) / steps + 1, step}, 0, count);
}

// Adds `stride` if all of `strides` divide it or are divisible by it.
void addStride(std::vector<std::int64_t>& strides, std::int64_t stride) {
  const auto divides = [stride](std::int64_t other) { return other % stride == 0 || stride % other == 0; };
  if (stride > 0 && std::find(strides.begin(), strides.end(), stride) == strides.end() &&
      std::all_of(strides.begin(), strides.end(), divides)) {
    strides.push_back(stride);
  }
}

// A dimension of a tensor, in bytes.
struct Move {
  std::int64_t stride;
  std::int64_t extent;
};

// Returns the dimensions that move in memory, without duplicates.
std::vector<Move> movesOf(const std::vector<const Geometry*>& tensors) {
  std::vector<Move> moves;
  for (const Geometry* tensor : tensors) {
    for (const auto i : c10::irange(tensor->sizes.size())) {
      const std::int64_t stride = tensor->strides[i] * toSigned(tensor->dtype.itemsize());
      const Move one{stride, stride * tensor->sizes[i]};
      const bool is_known = std::any_of(moves.begin(), moves.end(), [&one](const Move& other) {
        return other.stride == one.stride && other.extent == one.extent;
      });
      if (tensor->sizes[i] > 1 && stride > 0 && !is_known) {
        moves.push_back(one);
      }
    }
  }
  return moves;
}

// Returns true if `stride` needs an index: within it, a dimension moves along the next smaller stride. Other multiples
// of that one, such as every third row, are steps of its index: another index would cut the dimensions that move
// further along it.
bool needsIndex(std::int64_t stride, const std::vector<Move>& moves) {
  std::int64_t smaller = 0;
  for (const Move& one : moves) {
    smaller = one.stride < stride && stride % one.stride == 0 ? std::max(smaller, one.stride) : smaller;
  }
  return std::any_of(moves.begin(), moves.end(), [&](const Move& one) {
    return one.stride < stride && smaller < one.extent && one.extent <= stride;
  });
}

}  // namespace

IndexRange within(const IndexRange& range, std::int64_t begin, std::int64_t end) {
  const auto toNext = [&range](std::int64_t distance) { return (distance + range.step - 1) / range.step * range.step; };
  const std::int64_t first = range.first + toNext(std::max<std::int64_t>(begin - range.first, 0));
  const std::int64_t last = range.last - toNext(std::max<std::int64_t>(range.last - end, 0));
  return {first, std::max(first, last), range.step};
}

Geometry narrowed(const Geometry& geometry, const IndexRanges& ranges) {
  Geometry part = geometry;
  for (const auto i : c10::irange(ranges.size())) {
    part.sizes[i] = ranges[i].count();
    part.storage_offset += ranges[i].first * part.strides[i];
    part.strides[i] *= ranges[i].step;
  }
  return part;
}

at::Tensor narrowed(const at::Tensor& tensor, const IndexRanges& ranges) {
  at::Tensor part = tensor;
  for (const auto i : c10::irange(ranges.size())) {
    part = part.slice(toSigned(i), ranges[i].first, ranges[i].last, ranges[i].step);
  }
  return part;
}

// ---- Grid ----

std::shared_ptr<const Grid> Grid::of(std::size_t nbytes, const std::vector<const Geometry*>& tensors) {
  std::vector<std::int64_t> strides;
  std::int64_t unit = std::numeric_limits<std::int64_t>::max();
  for (const Geometry* tensor : tensors) {
    unit = std::min(unit, toSigned(tensor->dtype.itemsize()));
    addStride(strides, toSigned(tensor->dtype.itemsize()));
  }
  addStride(strides, unit);
  const std::vector<Move> moves = movesOf(tensors);
  for (const Move& one : moves) {
    if (needsIndex(one.stride, moves)) {
      addStride(strides, one.stride);
    }
  }
  std::sort(strides.rbegin(), strides.rend());
  std::vector<Level> levels;
  std::int64_t outer = 0;
  for (const std::int64_t stride : strides) {
    const auto all = (toSigned(nbytes) + stride - 1) / stride;
    levels.push_back({stride, outer == 0 ? std::max<std::int64_t>(all, 1) : outer / stride});
    outer = stride;
  }
  return std::shared_ptr<const Grid>{new Grid{nbytes, std::move(levels)}};
}

Box Grid::whole() const {
  IndexRanges ranges;
  ranges.reserve(levels_.size());
  for (const Level& level : levels_) {
    ranges.push_back({0, level.count});
  }
  return {shared_from_this(), std::move(ranges)};
}

std::vector<std::int64_t> Grid::indicesOf(std::int64_t byte) const {
  std::vector<std::int64_t> indices;
  indices.reserve(levels_.size());
  for (const Level& level : levels_) {
    indices.push_back(byte / level.stride);
    byte %= level.stride;
  }
  return indices;
}

std::int64_t Grid::stepOn(std::size_t level, std::int64_t step) const {
  // Steps that skip fewer bytes are not worth separate runs: a random fill of one value takes as long as one of about
  // 50 adjacent values.
  constexpr std::int64_t kShort = 200;
  return (step - 1) * levels_[level].stride >= kShort ? step : 1;
}

Grid::Steps Grid::stepsOf(std::int64_t stride, std::int64_t count) const {
  std::size_t level = 0;
  while (stride % levels_[level].stride != 0) {
    ++level;
  }
  return {level, stride / levels_[level].stride, count};
}

std::vector<Grid::Steps> Grid::stepsOf(const Geometry& geometry) const {
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  std::vector<Steps> steps;
  steps.reserve(geometry.sizes.size() + 1);
  for (const auto i : c10::irange(geometry.sizes.size())) {
    const bool moves = geometry.sizes[i] > 1;
    steps.push_back(moves ? stepsOf(geometry.strides[i] * itemsize, geometry.sizes[i]) : Steps{0, 0, 1});
  }
  steps.push_back(stepsOf(levels_.back().stride, itemsize / levels_.back().stride));
  return steps;
}

std::optional<Box> Grid::boxOf(const Geometry& geometry) const {
  if (!geometry.hasElements()) {
    return std::nullopt;
  }
  const std::vector<std::int64_t> first = indicesOf(geometry.storage_offset * toSigned(geometry.dtype.itemsize()));
  std::vector<std::int64_t> last = first;
  std::vector<std::int64_t> step(levels_.size(), 0);
  for (const Steps& steps : stepsOf(geometry)) {
    if (steps.count > 1) {
      last[steps.level] += steps.steps * (steps.count - 1);
      step[steps.level] = std::gcd(step[steps.level], steps.steps);
    }
  }
  IndexRanges ranges(levels_.size());
  for (std::size_t i = levels_.size(); i-- > 0;) {
    const std::int64_t count = levels_[i].count;
    if (i > 0 && last[i] >= count) {  // continues in the next row, so it may be anywhere in a row
      last[i - 1] += last[i] / count;
      step[i - 1] = 1;
      ranges[i] = {0, count};
    } else {
      ranges[i] = {first[i], last[i] + 1, stepOn(i, step[i])};
    }
  }
  return Box{shared_from_this(), std::move(ranges)};
}

// ---- Box ----

std::size_t Box::nbytes() const {
  std::int64_t bytes = grid_->levels_.back().stride;
  for (const IndexRange& range : ranges_) {
    bytes *= range.count();
  }
  return toSize(bytes);
}

std::int64_t Box::lead() const {
  std::int64_t first_byte = 0;
  for (const auto i : c10::irange(ranges_.size())) {
    first_byte += ranges_[i].first * grid_->levels_[i].stride;
  }
  return first_byte % kMemoryAlignment;
}

std::vector<std::int64_t> Box::packedStrides() const {
  std::vector<std::int64_t> strides(ranges_.size());
  std::int64_t stride = grid_->levels_.back().stride;
  for (std::size_t i = ranges_.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= ranges_[i].count();
  }
  return strides;
}

Box Box::withoutSteps() const {
  IndexRanges ranges = ranges_;
  for (IndexRange& range : ranges) {
    range.step = 1;
  }
  return {grid_, std::move(ranges)};
}

Box Box::withWholeElements(std::size_t itemsize) const {
  IndexRanges ranges = ranges_;
  for (const auto i : c10::irange(ranges.size())) {
    if (grid_->levels_[i].stride < toSigned(itemsize)) {
      ranges[i] = {0, grid_->levels_[i].count};
    }
  }
  return {grid_, std::move(ranges)};
}

std::int64_t Box::placeOf(std::int64_t byte) const {
  const std::vector<std::int64_t> strides = packedStrides();
  const std::vector<std::int64_t> indices = grid_->indicesOf(byte);
  std::int64_t place = lead();
  for (const auto i : c10::irange(ranges_.size())) {
    place += (indices[i] - ranges_[i].first) / ranges_[i].step * strides[i];
  }
  return place;
}

bool Box::contains(const Box& other) const {
  return std::equal(ranges_.begin(), ranges_.end(), other.ranges_.begin(),
                    [](const IndexRange& a, const IndexRange& b) {
                      return a.first <= b.first && b.last <= a.last && (b.first - a.first) % a.step == 0 &&
                             (b.step % a.step == 0 || b.count() == 1);
                    });
}

bool Box::overlaps(const Box& other) const {
  return std::equal(ranges_.begin(), ranges_.end(), other.ranges_.begin(),
                    [](const IndexRange& a, const IndexRange& b) { return a.first < b.last && b.first < a.last; });
}

Box Box::with(const Box& other) const {
  IndexRanges ranges = ranges_;
  for (const auto i : c10::irange(ranges.size())) {
    const IndexRange& added = other.ranges_[i];
    const auto step_of = [](const IndexRange& range) { return range.count() == 1 ? 0 : range.step; };
    const std::int64_t step = std::gcd(std::gcd(step_of(ranges[i]), step_of(added)), added.first - ranges[i].first);
    ranges[i] = {std::min(ranges[i].first, added.first), std::max(ranges[i].last, added.last), grid_->stepOn(i, step)};
  }
  return {grid_, std::move(ranges)};
}

// Rows of a matrix keep their strides; columns do not.
Box Box::keepingStrides() const {
  const auto& levels = grid_->levels_;
  IndexRanges ranges = ranges_;
  std::size_t outermost = 0;
  while (outermost + 1 < ranges.size() && ranges[outermost].count() == 1) {
    ++outermost;
  }
  ranges[outermost].step = 1;
  for (std::size_t i = outermost + 1; i < ranges.size(); ++i) {
    ranges[i] = {0, levels[i].count};
  }
  return {grid_, std::move(ranges)};
}

Geometry Box::shown(const Geometry& geometry) const {
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  const std::vector<std::int64_t> strides = packedStrides();
  Geometry packed = geometry;
  packed.storage_offset = geometry.hasElements() ? placeOf(geometry.storage_offset * itemsize) / itemsize : 0;
  for (const auto i : c10::irange(geometry.sizes.size())) {
    if (geometry.sizes[i] > 1) {
      const Grid::Steps steps = grid_->stepsOf(geometry.strides[i] * itemsize, geometry.sizes[i]);
      packed.strides[i] = steps.steps / ranges_[steps.level].step * strides[steps.level] / itemsize;
    }
  }
  return packed;
}

void Box::forEachRun(VisitRun visit) const {
  const auto& levels = grid_->levels_;
  // A complete inner range is contiguous with its surroundings.
  std::size_t inner = levels.size() - 1;
  while (inner > 0 && ranges_[inner].count() == levels[inner].count) {
    --inner;
  }
  const bool is_run = ranges_[inner].step == 1;
  const std::int64_t length = (is_run ? ranges_[inner].count() : 1) * levels[inner].stride;
  std::vector<std::int64_t> at;
  for (std::size_t i = 0; i <= inner; ++i) {
    at.push_back(ranges_[i].first);
  }
  std::int64_t packed = lead();
  while (true) {
    std::int64_t begin = 0;
    for (std::size_t i = 0; i <= inner; ++i) {
      begin += at[i] * levels[i].stride;
    }
    visit(begin, packed, length);
    packed += length;
    std::size_t next = is_run ? inner : inner + 1;
    while (next > 0 && (at[next - 1] += ranges_[next - 1].step) >= ranges_[next - 1].last) {
      at[next - 1] = ranges_[next - 1].first;
      --next;
    }
    if (next == 0) {
      return;
    }
  }
}

// A dimension can be narrowed if it alone moves along its index and stays within it. Other dimensions are kept whole.
std::optional<IndexRanges> Box::elementsOf(const Geometry& geometry) const {
  const auto& levels = grid_->levels_;
  const std::vector<std::int64_t> first =
      grid_->indicesOf(geometry.storage_offset * toSigned(geometry.dtype.itemsize()));
  const std::vector<Grid::Steps> steps = grid_->stepsOf(geometry);
  std::vector<std::int64_t> last = first;
  std::vector<int> movers(levels.size(), 0);
  for (const Grid::Steps& one : steps) {
    last[one.level] += one.steps * (one.count - 1);
    movers[one.level] += one.steps > 0 && one.count > 1 ? 1 : 0;
  }
  std::vector<bool> is_known(levels.size());
  std::int64_t carried = 0;
  for (std::size_t i = levels.size(); i-- > 0;) {
    last[i] += carried;
    is_known[i] = carried == 0 && (i == 0 || last[i] < levels[i].count);
    carried = i > 0 ? last[i] / levels[i].count : 0;
  }
  for (const auto i : c10::irange(levels.size())) {
    if (is_known[i] && (last[i] < ranges_[i].first || first[i] >= ranges_[i].last)) {
      return std::nullopt;
    }
  }
  IndexRanges elements;
  for (const auto i : c10::irange(geometry.sizes.size())) {
    const Grid::Steps& one = steps[i];
    elements.push_back({0, geometry.sizes[i]});
    if (geometry.sizes[i] > 1 && one.steps > 0 && is_known[one.level] && movers[one.level] == 1) {
      elements.back() = movingWithin(ranges_[one.level], first[one.level], one.steps, one.count);
      if (elements.back().first >= elements.back().last) {
        return std::nullopt;
      }
    }
  }
  return elements;
}

std::optional<IndexRanges> Box::widenToElementsOf(const Geometry& geometry) {
  if (!geometry.hasElements()) {
    return std::nullopt;
  }
  while (true) {
    std::optional<IndexRanges> elements = elementsOf(geometry);
    const std::optional<Box> needed = elements ? grid_->boxOf(narrowed(geometry, *elements)) : std::nullopt;
    if (!needed || contains(*needed)) {
      return elements;
    }
    *this = with(*needed);
  }
}

namespace {

void copyBytes(
    const Storage& to, std::int64_t to_byte, const Storage& from, std::int64_t from_byte, std::int64_t count) {
  if (to.device().is_cpu()) {
    std::memcpy(static_cast<std::byte*>(to.mutable_data()) + to_byte,
                static_cast<const std::byte*>(from.data()) + from_byte, toSize(count));
    return;
  }
  bytesAt(to, toSize(to_byte), toSize(count)).copy_(bytesAt(from, toSize(from_byte), toSize(count)));
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

std::shared_ptr<const PartsMemory> Boxes::memoryOf(c10::function_ref<Part(const Box&)> make_part) const {
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
