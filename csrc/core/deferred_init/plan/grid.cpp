#include "grid.h"

#include <algorithm>
#include <limits>

#include <c10/util/irange.h>

#include "../../support/sizes.h"

namespace torchext {

namespace {

// Adds `stride` if all of `strides` divide it or are divisible by it.
void addStride(std::vector<std::int64_t>& strides, std::int64_t stride) {
  const auto divides = [stride](std::int64_t other) { return other % stride == 0 || stride % other == 0; };
  if (stride > 0 && std::find(strides.begin(), strides.end(), stride) == strides.end() &&
      std::all_of(strides.begin(), strides.end(), divides)) {
    strides.push_back(stride);
  }
}

}  // namespace

Geometry narrowed(const Geometry& geometry, const IndexRanges& ranges) {
  Geometry part = geometry;
  for (const auto i : c10::irange(ranges.size())) {
    part.sizes[i] = ranges[i].second - ranges[i].first;
    part.storage_offset += ranges[i].first * part.strides[i];
  }
  return part;
}

at::Tensor narrowed(const at::Tensor& tensor, const IndexRanges& ranges) {
  at::Tensor part = tensor;
  for (const auto i : c10::irange(ranges.size())) {
    part = part.narrow(toSigned(i), ranges[i].first, ranges[i].second - ranges[i].first);
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
  for (const Geometry* tensor : tensors) {
    for (const auto i : c10::irange(tensor->sizes.size())) {
      if (tensor->sizes[i] > 1) {
        addStride(strides, tensor->strides[i] * toSigned(tensor->dtype.itemsize()));
      }
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
    ranges.emplace_back(0, level.count);
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
  for (const Steps& steps : stepsOf(geometry)) {
    last[steps.level] += steps.steps * (steps.count - 1);
  }
  IndexRanges ranges(levels_.size());
  for (std::size_t i = levels_.size(); i-- > 0;) {
    const std::int64_t count = levels_[i].count;
    if (i > 0 && last[i] >= count) {  // continues in the next row, so it may be anywhere in a row
      last[i - 1] += last[i] / count;
      ranges[i] = {0, count};
    } else {
      ranges[i] = {first[i], last[i] + 1};
    }
  }
  return Box{shared_from_this(), std::move(ranges)};
}

// ---- Box ----

std::size_t Box::nbytes() const {
  std::int64_t bytes = grid_->levels_.back().stride;
  for (const auto& [first, last] : ranges_) {
    bytes *= last - first;
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
    stride *= ranges_[i].second - ranges_[i].first;
  }
  return strides;
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
    place += (indices[i] - ranges_[i].first) * strides[i];
  }
  return place;
}

bool Box::contains(const Box& other) const {
  return std::equal(ranges_.begin(), ranges_.end(), other.ranges_.begin(),
                    [](const auto& a, const auto& b) { return a.first <= b.first && b.second <= a.second; });
}

bool Box::overlaps(const Box& other) const {
  return std::equal(ranges_.begin(), ranges_.end(), other.ranges_.begin(),
                    [](const auto& a, const auto& b) { return a.first < b.second && b.first < a.second; });
}

Box Box::with(const Box& other) const {
  IndexRanges ranges = ranges_;
  for (const auto i : c10::irange(ranges.size())) {
    ranges[i].first = std::min(ranges[i].first, other.ranges_[i].first);
    ranges[i].second = std::max(ranges[i].second, other.ranges_[i].second);
  }
  return {grid_, std::move(ranges)};
}

// Rows of a matrix keep their strides; columns do not.
Box Box::keepingStrides() const {
  const auto& levels = grid_->levels_;
  IndexRanges ranges = ranges_;
  std::size_t outermost = 0;
  while (outermost + 1 < ranges.size() && ranges[outermost].second - ranges[outermost].first == 1) {
    ++outermost;
  }
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
      packed.strides[i] = steps.steps * strides[steps.level] / itemsize;
    }
  }
  return packed;
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
    if (is_known[i] && (last[i] < ranges_[i].first || first[i] >= ranges_[i].second)) {
      return std::nullopt;
    }
  }
  IndexRanges elements;
  for (const auto i : c10::irange(geometry.sizes.size())) {
    const Grid::Steps& one = steps[i];
    elements.emplace_back(0, geometry.sizes[i]);
    if (geometry.sizes[i] > 1 && one.steps > 0 && is_known[one.level] && movers[one.level] == 1) {
      const auto [begin, end] = ranges_[one.level];
      // Returns the first element at or after `index`.
      const auto reach = [&](std::int64_t index) {
        const std::int64_t distance = std::max<std::int64_t>(index - first[one.level], 0);
        return std::min((distance + one.steps - 1) / one.steps, one.count);
      };
      elements.back() = {reach(begin), reach(end)};
      if (elements.back().first >= elements.back().second) {
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

}  // namespace torchext
