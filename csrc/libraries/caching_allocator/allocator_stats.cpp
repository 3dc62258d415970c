#include "allocator_stats.h"

namespace torchext {

namespace {

constexpr std::array<StatPool, 3> kStatPools{StatPool::kAll, StatPool::kSmall, StatPool::kLarge};

}  // namespace

void AllocatorStats::resetPeak() {
  forEachPooled(*this, [](const char* /*name*/, PooledStat& stat) {
    for (const StatPool pool : kStatPools) {
      stat.of(pool).resetPeak();
    }
  });
  oversize_allocations.resetPeak();
  oversize_segments.resetPeak();
}

void AllocatorStats::resetAccumulated() {
  forEachPooled(*this, [](const char* /*name*/, PooledStat& stat) {
    for (const StatPool pool : kStatPools) {
      stat.of(pool).resetAccumulated();
    }
  });
  oversize_allocations.resetAccumulated();
  oversize_segments.resetAccumulated();
  num_alloc_retries = 0;
  num_ooms = 0;
  num_sync_all_streams = 0;
  num_device_alloc = 0;
  num_device_free = 0;
}

}  // namespace torchext
