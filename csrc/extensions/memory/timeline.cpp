#include "timeline.h"

#include <atomic>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"

namespace torchext {

namespace {

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

}  // namespace

Timeline::Timeline() : number_{++timelines_begun} {}

AllocationNumber Timeline::addBirth(AllocationRecord record, std::int64_t sequence_nr, std::size_t reserved) {
  const Locked lock{LockRank::kTimelines};
  record.born = toSigned(data_.events.size());
  if (record.scope < 0 && sequence_nr >= 0) {
    record.scope = scopeOfNode(sequence_nr);
  }
  data_.events.push_back(
      {toSigned(data_.allocations.size()), toSigned(reserved), c10::getTime(/*allow_monotonic=*/true)});
  return add(record);
}

AllocationNumber Timeline::addExisting(const AllocationRecord& record) {
  const Locked lock{LockRank::kTimelines};
  return add(record);
}

AllocationNumber Timeline::add(const AllocationRecord& record) {
  data_.allocations.push_back(record);
  ++version_;
  return {static_cast<std::int32_t>(data_.allocations.size() - 1), number_};
}

void Timeline::addDeath(AllocationNumber allocation, std::size_t reserved) {
  const Locked lock{LockRank::kTimelines};
  if (AllocationRecord* record = find(allocation)) {
    record->died = toSigned(data_.events.size());
    data_.events.push_back({~allocation.number, toSigned(reserved), c10::getTime(/*allow_monotonic=*/true)});
    ++version_;
  }
}

void Timeline::setCategory(AllocationNumber allocation, MemoryCategory category) {
  const Locked lock{LockRank::kTimelines};
  if (AllocationRecord* record = find(allocation)) {
    record->category = category;
    ++version_;
  }
}

void Timeline::markActivations() {
  const Locked lock{LockRank::kTimelines};
  ++version_;
  for (AllocationRecord& record : data_.allocations) {
    if (record.died < 0 && record.phase == MemoryPhase::kForward && record.category == MemoryCategory::kTemporary) {
      record.category = MemoryCategory::kActivation;
    }
  }
}

std::int32_t Timeline::numberOf(const std::string& text) {
  const Locked lock{LockRank::kTimelines};
  const auto [entry, is_new] = numbers_.try_emplace(text, static_cast<std::int32_t>(data_.texts.size()));
  if (is_new) {
    data_.texts.push_back(text);
  }
  return entry->second;
}

std::int64_t Timeline::countEvents() const {
  const Locked lock{LockRank::kTimelines};
  return toSigned(data_.events.size());
}

std::int64_t Timeline::version() const {
  const Locked lock{LockRank::kTimelines};
  return version_;
}

TimelineData Timeline::data() const {
  const Locked lock{LockRank::kTimelines};
  return data_;
}

BytesByCategory Timeline::liveBytes(std::int64_t place) const {
  const Locked lock{LockRank::kTimelines};
  BytesByCategory bytes{};
  for (const AllocationRecord& record : data_.allocations) {
    if (record.place == place && record.died < 0) {
      bytes.at(static_cast<std::size_t>(record.category)) += record.size;
    }
  }
  return bytes;
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
  return allocation.number >= 0 && allocation.timeline == number_ ? &data_.allocations[toSize(allocation.number)]
                                                                  : nullptr;
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
