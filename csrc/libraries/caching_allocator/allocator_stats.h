#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <torchext/macros.h>

namespace torchext {

// A quantity over time, as `torch.cuda.memory_stats()` reports it.
struct MemoryStat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;  // the sum of all increases
  std::int64_t freed = 0;      // the sum of all decreases

  void increase(std::int64_t amount) noexcept {
    current += amount;
    peak = std::max(peak, current);
    allocated += amount;
  }

  void decrease(std::int64_t amount) noexcept {
    current -= amount;
    freed += amount;
  }

  void resetPeak() noexcept {
    peak = current;
  }

  void resetAccumulated() noexcept {
    allocated = 0;
    freed = 0;
  }
};

// The statistics by pool, in the order in which PyTorch lists them.
enum class StatPool : std::uint8_t { kAll, kSmall, kLarge };

class PooledStat {
 public:
  void increase(StatPool pool, std::int64_t amount) noexcept {
    of(StatPool::kAll).increase(amount);
    of(pool).increase(amount);
  }

  void decrease(StatPool pool, std::int64_t amount) noexcept {
    of(StatPool::kAll).decrease(amount);
    of(pool).decrease(amount);
  }

  const MemoryStat& of(StatPool pool) const noexcept {
    return pools_[static_cast<std::size_t>(pool)];
  }

  MemoryStat& of(StatPool pool) noexcept {
    return pools_[static_cast<std::size_t>(pool)];
  }

 private:
  std::array<MemoryStat, 3> pools_;
};

// The statistics of one device, by the names of `torch._C._cuda_memoryStats()`.
struct TORCHEXT_API AllocatorStats {
  PooledStat allocation;
  PooledStat segment;
  PooledStat active;
  PooledStat inactive_split;
  PooledStat allocated_bytes;
  PooledStat reserved_bytes;
  PooledStat active_bytes;
  PooledStat inactive_split_bytes;
  PooledStat requested_bytes;
  MemoryStat oversize_allocations;
  MemoryStat oversize_segments;
  std::int64_t num_alloc_retries = 0;
  std::int64_t num_ooms = 0;
  std::int64_t num_sync_all_streams = 0;
  std::int64_t num_device_alloc = 0;
  std::int64_t num_device_free = 0;

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

  void resetPeak();
  void resetAccumulated();
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
