#include "timeline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/function.h>

#include "../../core/support/locks.h"
#include "../../core/support/sizes.h"

namespace torchext {

namespace {

std::int64_t nowInNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::atomic<std::uint64_t> timelines_begun{0};

std::atomic<bool> is_tracking{false};

thread_local ThreadScope thread_scope;

struct Current {
  int trackers = 0;
  std::shared_ptr<Timeline> timeline;
};

Current& currentState() {
  static auto* state = new Current;  // leaked: storages are freed at any time
  return *state;
}

void apply(MemoryPoint& point, const AllocationRecord& record, bool is_birth) {
  std::size_t& of_category = point.by_category[static_cast<std::size_t>(record.category)];
  if (is_birth) {
    point.allocated += record.size;
    of_category += record.size;
  } else {
    point.allocated -= record.size;
    of_category -= record.size;
  }
}

}  // namespace

Timeline::Timeline() : number_{++timelines_begun} {}

AllocationNumber Timeline::addBirth(AllocationRecord record, std::size_t reserved) {
  const Locked lock{LockRank::kTimelines};
  const auto number = static_cast<std::int32_t>(records_.size());
  record.born = toSigned(events_.size());
  if (record.scope < 0 && record.sequence_nr >= 0) {
    record.scope = scopeOfNode(record.sequence_nr);
  }
  record.died = -1;
  events_.push_back({number, /*is_birth=*/true, reserved, nowInNanoseconds()});
  records_.push_back(record);
  return {number, number_};
}

AllocationNumber Timeline::addExisting(AllocationRecord record) {
  const Locked lock{LockRank::kTimelines};
  record.born = -1;
  record.died = -1;
  records_.push_back(record);
  return {static_cast<std::int32_t>(records_.size() - 1), number_};
}

void Timeline::addDeath(AllocationNumber allocation, std::size_t reserved) {
  const Locked lock{LockRank::kTimelines};
  if (AllocationRecord* record = find(allocation)) {
    record->died = toSigned(events_.size());
    events_.push_back({allocation.number, /*is_birth=*/false, reserved, nowInNanoseconds()});
  }
}

void Timeline::setCategory(AllocationNumber allocation, MemoryCategory category) {
  const Locked lock{LockRank::kTimelines};
  if (AllocationRecord* record = find(allocation)) {
    record->category = category;
  }
}

void Timeline::markActivations() {
  const Locked lock{LockRank::kTimelines};
  for (AllocationRecord& record : records_) {
    if (record.died < 0 && record.phase == MemoryPhase::kForward && record.category == MemoryCategory::kTemporary) {
      record.category = MemoryCategory::kActivation;
    }
  }
}

std::int32_t Timeline::numberOf(const std::string& text) {
  const Locked lock{LockRank::kTimelines};
  const auto [entry, is_new] = numbers_.try_emplace(text, static_cast<std::int32_t>(names_.size()));
  if (is_new) {
    names_.push_back(text);
  }
  return entry->second;
}

std::string Timeline::nameOf(std::int32_t number) const {
  const Locked lock{LockRank::kTimelines};
  return number < 0 ? std::string{} : names_.at(toSize(number));
}

std::int64_t Timeline::countEvents() const {
  const Locked lock{LockRank::kTimelines};
  return toSigned(events_.size());
}

std::vector<c10::Device> Timeline::devices() const {
  const Locked lock{LockRank::kTimelines};
  std::vector<c10::Device> devices;
  for (const AllocationRecord& record : records_) {
    if (std::find(devices.begin(), devices.end(), record.device) == devices.end()) {
      devices.push_back(record.device);
    }
  }
  return devices;
}

MemoryPoint Timeline::beforeAll(c10::Device device) const {
  MemoryPoint point{};
  point.event = -1;
  for (const AllocationRecord& record : records_) {
    if (record.born < 0 && record.device == device) {
      apply(point, record, /*is_birth=*/true);
    }
  }
  // Only the first event reports the bytes reserved before it.
  point.reserved = point.allocated;
  return point;
}

// Calls `visit` with the state before all events, and with the state after each event of `device` before `end`.
template <typename Visit>
void Timeline::replay(c10::Device device, std::int64_t end, const Visit& visit) const {
  MemoryPoint point = beforeAll(device);
  visit(point);
  for (const auto i : c10::irange(std::min(end, toSigned(events_.size())))) {
    const MemoryEvent& event = events_[toSize(i)];
    const AllocationRecord& record = records_[toSize(event.allocation)];
    if (record.device == device) {
      apply(point, record, event.is_birth);
      point.event = i;
      point.time_ns = event.time_ns;
      point.reserved = event.reserved;
      visit(point);
    }
  }
}

MemoryPoint Timeline::peak(c10::Device device, std::int64_t begin, std::int64_t end, bool of_reserved) const {
  const Locked lock{LockRank::kTimelines};
  MemoryPoint peak{};
  bool has_begun = false;
  const auto bytes = [of_reserved](const MemoryPoint& point) { return of_reserved ? point.reserved : point.allocated; };
  replay(device, end, [&](const MemoryPoint& point) {
    // The state in which the range begins also counts.
    if (point.event < begin || !has_begun || bytes(point) > bytes(peak)) {
      peak = point;
    }
    has_begun = has_begun || point.event >= begin - 1;
  });
  return peak;
}

MemoryPoint Timeline::pointAfter(c10::Device device, std::int64_t event) const {
  const Locked lock{LockRank::kTimelines};
  MemoryPoint last{};
  replay(device, event + 1, [&last](const MemoryPoint& point) { last = point; });
  return last;
}

std::vector<MemoryPoint> Timeline::curve(c10::Device device,
                                         std::int64_t begin,
                                         std::int64_t end,
                                         std::size_t count) const {
  const Locked lock{LockRank::kTimelines};
  const auto stretch = std::max<std::int64_t>(1, (end - begin) / toSigned(std::max<std::size_t>(count, 1)));
  std::vector<MemoryPoint> points;
  std::int64_t last_stretch = -1;
  replay(device, end, [&](const MemoryPoint& point) {
    const std::int64_t number = point.event < begin ? -1 : (point.event - begin) / stretch;
    if (points.empty() || number != last_stretch) {
      points.push_back(point);
    } else if (point.event < begin || point.allocated > points.back().allocated) {
      points.back() = point;
    }
    last_stretch = number;
  });
  return points;
}

std::vector<std::int32_t> Timeline::aliveAfter(c10::Device device, std::int64_t event) const {
  const Locked lock{LockRank::kTimelines};
  std::vector<std::int32_t> alive;
  for (const auto i : c10::irange(records_.size())) {
    const AllocationRecord& record = records_[i];
    if (record.device == device && record.born <= event && (record.died < 0 || record.died > event)) {
      alive.push_back(static_cast<std::int32_t>(i));
    }
  }
  return alive;
}

std::map<std::int32_t, std::size_t> Timeline::peakOfLines(c10::Device device,
                                                          std::int64_t begin,
                                                          std::int64_t end) const {
  const Locked lock{LockRank::kTimelines};
  std::map<std::int32_t, std::size_t> held;
  for (const AllocationRecord& record : records_) {
    if (record.device == device && record.born < begin && (record.died < 0 || record.died >= begin)) {
      held[record.line] += record.size;
    }
  }
  std::map<std::int32_t, std::size_t> peaks = held;
  const auto size = toSigned(events_.size());
  for (std::int64_t i = std::clamp<std::int64_t>(begin, 0, size); i < std::min(end, size); ++i) {
    const MemoryEvent& event = events_[toSize(i)];
    const AllocationRecord& record = records_[toSize(event.allocation)];
    if (record.device == device) {
      std::size_t& bytes = held[record.line];
      bytes += event.is_birth ? record.size : 0 - record.size;
      peaks[record.line] = std::max(peaks[record.line], bytes);
    }
  }
  return peaks;
}

AllocationRecord Timeline::record(std::int32_t allocation) const {
  const Locked lock{LockRank::kTimelines};
  return records_.at(toSize(allocation));
}

std::vector<MemoryEvent> Timeline::events(std::int64_t begin, std::int64_t end) const {
  const Locked lock{LockRank::kTimelines};
  const auto size = toSigned(events_.size());
  const std::int64_t first = std::clamp<std::int64_t>(begin, 0, size);
  return {events_.begin() + first, events_.begin() + std::clamp(end, first, size)};
}

void Timeline::addBoundary(std::uint64_t sequence_nr, std::int32_t scope) {
  const Locked lock{LockRank::kTimelines};
  boundaries_[sequence_nr] = scope;
}

std::int32_t Timeline::scopeOfNode(std::int64_t sequence_nr) const {
  const auto after = boundaries_.upper_bound(static_cast<std::uint64_t>(sequence_nr));
  return after == boundaries_.begin() ? -1 : std::prev(after)->second;
}

AllocationRecord* Timeline::find(AllocationNumber allocation) {
  return allocation.number >= 0 && allocation.timeline == number_ ? &records_[toSize(allocation.number)] : nullptr;
}

std::shared_ptr<Timeline> openTimeline() {
  Current& current = currentState();
  const Locked lock{LockRank::kTimelines};
  if (current.trackers++ == 0) {
    current.timeline = std::make_shared<Timeline>();
    is_tracking = true;
  }
  return current.timeline;
}

void closeTimeline() {
  std::shared_ptr<Timeline> last;  // freed after the lock is released
  Current& current = currentState();
  const Locked lock{LockRank::kTimelines};
  TORCH_CHECK(current.trackers > 0, "No memory tracker is open.");
  if (--current.trackers == 0) {
    is_tracking = false;
    last = std::exchange(current.timeline, nullptr);
  }
}

bool isTracking() noexcept {
  return is_tracking.load(std::memory_order_relaxed);
}

std::shared_ptr<Timeline> currentTimeline() {
  Current& current = currentState();
  const Locked lock{LockRank::kTimelines};
  return current.timeline;
}

const ThreadScope& threadScope() noexcept {
  return thread_scope;
}

ThreadScope setThreadScope(std::int32_t scope, MemoryPhase phase, bool traces_lines, std::uint64_t root) {
  static std::atomic<std::uint64_t> passes{0};
  const bool is_in_backward = torch::autograd::get_current_node() != nullptr;
  ForwardPass pass;
  if (phase == MemoryPhase::kForward) {
    pass = thread_scope.phase == MemoryPhase::kForward ? thread_scope.pass : ForwardPass{root, ++passes};
  }
  const ThreadScope previous = std::exchange(thread_scope, {scope, phase, traces_lines, is_in_backward, pass});
  if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
    if (is_in_backward) {
      const bool ends_forward = previous.phase == MemoryPhase::kForward && phase != MemoryPhase::kForward;
      if (ends_forward) {
        timeline->markActivations();  // the recomputed ones
      }
    } else if (phase != MemoryPhase::kOptimizer) {
      timeline->addBoundary(at::sequence_number::peek(), scope);
    }
  }
  return previous;
}

}  // namespace torchext
