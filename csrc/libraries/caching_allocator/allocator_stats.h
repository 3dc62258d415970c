#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace torchext {

// A quantity over time, as `torch.cuda.memory_stats()` reports it.
using MemoryStat = c10::CachingAllocator::Stat;

// A statistic of all pools, the small and the large pool, in the order of `StatPool`.
using PooledStat = c10::CachingAllocator::StatArray;
using StatPool = c10::CachingAllocator::StatType;

inline const MemoryStat& totalOf(const PooledStat& stat) noexcept {
  return stat.front();
}

// The statistics of one device, by the names of `torch._C._cuda_memoryStats()`. Those that only some releases of
// PyTorch have are not kept.
struct AllocatorStats : c10::CachingDeviceAllocator::DeviceStats {
  // Calls `visit(name, stat)` for each statistic that is kept by pool.
  template <typename Self, typename Visit>
  static void forEachPooled(Self& self, const Visit& visit) {
    visit("allocation", self.allocation);
    visit("segment", self.segment);
    visit("active", self.active);
    visit("inactive_split", self.inactive_split);
    visit("allocated_bytes", self.allocated_bytes);
    visit("reserved_bytes", self.reserved_bytes);
    visit("active_bytes", self.active_bytes);
    visit("inactive_split_bytes", self.inactive_split_bytes);
    visit("requested_bytes", self.requested_bytes);
  }

  void resetPeak() {
    forEach([](MemoryStat& stat) { stat.reset_peak(); });
  }

  void resetAccumulated() {
    forEach([](MemoryStat& stat) { stat.reset_accumulated(); });
    num_alloc_retries = 0;
    num_ooms = 0;
    num_sync_all_streams = 0;
    num_device_alloc = 0;
    num_device_free = 0;
  }

 private:
  template <typename Visit>
  void forEach(const Visit& visit) {
    forEachPooled(*this, [&visit](const char* /*name*/, PooledStat& stat) {
      for (MemoryStat& of_pool : stat) {
        visit(of_pool);
      }
    });
    visit(oversize_allocations);
    visit(oversize_segments);
  }
};

// The statistics of pinned memory, by the names of `torch._C._cuda_hostMemoryStats()`.
struct HostStats {
  MemoryStat allocations;  // from the driver
  MemoryStat active_requests;
  MemoryStat allocated_bytes;
  MemoryStat active_bytes;

  // Calls `visit(name, stat)` for each statistic.
  template <typename Self, typename Visit>
  static void forEach(Self& self, const Visit& visit) {
    visit("allocations", self.allocations);
    visit("active_requests", self.active_requests);
    visit("allocated_bytes", self.allocated_bytes);
    visit("active_bytes", self.active_bytes);
  }
};

}  // namespace torchext
