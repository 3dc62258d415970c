#include "byte_set.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <c10/util/irange.h>

#include "sizes.h"

namespace torchext {

namespace {

// A limit of runs. The columns of a matrix have as many runs as it has rows.
constexpr std::size_t kMaxRuns = std::size_t{1} << 14U;

struct Dimension {
  std::size_t size;
  std::size_t stride;  // in bytes
};

// Returns the dimensions of more than one distinct element, the outermost first.
std::vector<Dimension> dimensionsOf(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::size_t itemsize) {
  std::vector<Dimension> dimensions;
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] > 1 && strides[i] != 0) {
      dimensions.push_back({toSize(sizes[i]), toSize(strides[i]) * itemsize});
    }
  }
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  return dimensions;
}

}  // namespace

ByteSet::ByteSet(std::size_t begin, std::size_t end) {
  if (begin < end) {
    runs_.emplace_back(begin, end);
  }
}

ByteSet ByteSet::joined(c10::ArrayRef<Run> runs) {
  ByteSet set;
  for (const Run& run : runs) {
    if (!set.runs_.empty() && run.first <= set.runs_.back().second) {
      set.runs_.back().second = std::max(set.runs_.back().second, run.second);
    } else {
      set.runs_.push_back(run);
    }
  }
  return set;
}

std::optional<ByteSet> ByteSet::ofElements(c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides,
                                           int64_t storage_offset,
                                           std::size_t itemsize) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return ByteSet{};
  }
  std::vector<Dimension> dimensions = dimensionsOf(sizes, strides, itemsize);
  std::size_t length = itemsize;
  while (!dimensions.empty() && dimensions.back().stride <= length) {
    length += (dimensions.back().size - 1) * dimensions.back().stride;
    dimensions.pop_back();
  }
  const auto first = toSize(storage_offset) * itemsize;
  if (dimensions.empty()) {
    return ByteSet{first, first + length};
  }
  std::vector<std::size_t> begins{first};
  for (const Dimension& dimension : dimensions) {
    if (dimension.size > kMaxRuns / begins.size()) {
      return std::nullopt;
    }
    std::vector<std::size_t> inner;
    inner.reserve(begins.size() * dimension.size);
    for (const std::size_t begin : begins) {
      for (const auto i : c10::irange(dimension.size)) {
        inner.push_back(begin + i * dimension.stride);
      }
    }
    begins = std::move(inner);
  }
  std::vector<Run> runs;
  runs.reserve(begins.size());
  for (const std::size_t begin : begins) {
    runs.emplace_back(begin, begin + length);
  }
  std::sort(runs.begin(), runs.end());  // dimensions may overlap
  return joined(runs);
}

void ByteSet::add(const ByteSet& other) {
  if (other.isEmpty()) {
    return;
  }
  if (isEmpty()) {
    runs_ = other.runs_;
    return;
  }
  std::vector<Run> runs;
  runs.reserve(runs_.size() + other.runs_.size());
  std::merge(runs_.begin(), runs_.end(), other.runs_.begin(), other.runs_.end(), std::back_inserter(runs));
  *this = joined(runs);
}

void ByteSet::remove(const ByteSet& other) {
  decltype(runs_) left;
  const auto* cut = other.runs_.begin();
  for (Run run : runs_) {
    while (cut != other.runs_.end() && cut->second <= run.first) {
      ++cut;
    }
    for (const auto* next = cut; next != other.runs_.end() && next->first < run.second; ++next) {
      if (run.first < next->first) {
        left.emplace_back(run.first, next->first);
      }
      run.first = std::min(next->second, run.second);
    }
    if (run.first < run.second) {
      left.push_back(run);
    }
  }
  runs_ = std::move(left);
}

bool ByteSet::overlaps(const ByteSet& other) const {
  const auto* own = runs_.begin();
  const auto* its = other.runs_.begin();
  while (own != runs_.end() && its != other.runs_.end()) {
    if (own->first < its->second && its->first < own->second) {
      return true;
    }
    ++(own->second <= its->second ? own : its);
  }
  return false;
}

}  // namespace torchext
