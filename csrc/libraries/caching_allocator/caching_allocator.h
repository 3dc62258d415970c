#pragma once

// NOTE [The allocator is simulated]
//
// The GPU memory of a program is what PyTorch's caching allocator takes from the driver. It depends on the order of all
// allocations and frees, on rounding, and on which free block is split for which request. So the allocator is simulated
// by the rules of CUDACachingAllocator.cpp, on addresses without memory:
//
// - Sizes are rounded to 512 bytes, or as `roundup_power2_divisions` sets.
// - The small pool serves up to 1 MiB from segments of 2 MiB. The large pool serves less than 10 MiB from segments of
//   20 MiB, and more from a segment per request, rounded to 2 MiB.
// - The smallest sufficient free block of the stream is used; of equal ones, that with the lowest address. The
//   remainder is split off if it is large enough.
// - A freed block is merged with its free neighbors. A block that other streams used becomes free when they are done:
//   here at once, because there is no work to wait for.
// - When the driver has no more memory, free segments are returned to it and the request is retried.
// - CUDA graphs and `torch.cuda.use_mem_pool()` allocate from private pools. Their segments serve no other allocations
//   and stay until the last graph of the pool is destroyed.
//
// The settings are PyTorch's: `PYTORCH_ALLOC_CONF` as PyTorch parses it, and the functions that change it later. Not
// simulated: `backend:cudaMallocAsync`, and pools with another allocator (`torch.cuda.MemPool(allocator)`).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <torchext/macros.h>

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

struct BlockPool;

// Addresses that get memory page by page, on demand: PyTorch's `expandable_segments:True`. The blocks in the segment
// record which pages have memory.
struct ExpandableSegment {
  std::uintptr_t begin;   // a multiple of `page_size`
  std::size_t page_size;  // in bytes
};

// A piece of a segment of the simulated allocator: in use, free, or (in an expandable segment) without memory. The
// pieces of a segment form a list in the order of their addresses.
struct Block {
  Block(c10::StreamId for_stream, std::size_t of_size, BlockPool& of_pool, std::uintptr_t at_address)
      : stream{for_stream}, size{of_size}, pool{&of_pool}, address{at_address} {}

  c10::StreamId stream;                        // the stream it was allocated for; only that stream can reuse it
  std::size_t size;                            // in bytes
  std::size_t requested = 0;                   // the bytes requested by its last allocation
  BlockPool* pool;                             // the pool that holds it while it is free
  std::uintptr_t address;                      // in an address space that is never read
  Block* previous = nullptr;                   // the neighbors in the segment
  Block* next = nullptr;                       //
  bool is_allocated = false;                   //
  bool is_mapped = true;                       // false for a part of an expandable segment without memory
  bool is_awaited = false;                     // freed, but other streams may still use it
  std::uint64_t age_base = 0;                  // see BlockPool::searches
  ExpandableSegment* segment = nullptr;        // the expandable segment that contains it, or null
  c10::SmallVector<c10::StreamId, 1> used_on;  // the other streams named by `record_stream()`

  bool isSplit() const noexcept {
    return previous != nullptr || next != nullptr;
  }

  bool isFree() const noexcept {
    return !is_allocated && !is_awaited;
  }
};

// Orders blocks for the best-fit search.
struct BySize {
  bool operator()(const Block* a, const Block* b) const noexcept {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const noexcept {
    return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
  }
};

// Names a pool as PyTorch's `MempoolId_t` does: zeros for the default pool, and the numbers of
// `torch.cuda.graph_pool_handle()` or `MemPool.id` for others.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// Free blocks. PyTorch keeps small and large blocks apart.
struct BlockPool {
  BlockPool(StatPool of_kind, PoolId of_id) : kind{of_kind}, id{of_id} {}

  StatPool kind;
  PoolId id;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
  // The number of searches for a block. The age of a block is the number of searches since it became free.
  std::uint64_t searches = 0;

  bool isSmall() const noexcept {
    return kind == StatPool::SMALL_POOL;
  }

  void insert(Block* block) {
    block->age_base = searches;
    free.insert(block);
  }

  std::uint64_t ageOf(const Block& block) const noexcept {
    return searches - block.age_base;
  }
};

// The actions of the allocator, as `torch.cuda.memory._snapshot()` names them.
enum class MemoryAction : std::uint8_t {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,
  kSegmentUnmap,
  kOutOfMemory,
};

// Called for each action with the address, the bytes (as requested, where that differs) and the stream.
using MemoryObserver =
    std::function<void(MemoryAction action, std::uintptr_t address, std::size_t bytes, c10::StreamId stream)>;

// The memory of the driver. Addresses are handed out in ascending order and never reused.
class DriverMemory {
 public:
  explicit DriverMemory(std::uintptr_t first_address) : address_{first_address} {}

  std::size_t capacity() const noexcept {
    return capacity_;
  }

  // If `is_limited`, `take()` fails beyond `capacity`.
  void setCapacity(std::size_t capacity, bool is_limited) noexcept {
    capacity_ = capacity;
    is_limited_ = is_limited;
  }

  bool isLimited() const noexcept {
    return is_limited_;
  }

  // Returns the unused capacity: 0 if more is in use than the capacity that was set last.
  std::size_t available() const noexcept {
    return capacity_ > used_ ? capacity_ - used_ : 0;
  }

  std::size_t used() const noexcept {
    return used_;
  }

  // Returns false and takes nothing if there is not enough memory.
  bool take(std::size_t bytes) noexcept {
    const bool is_enough = !is_limited_ || bytes <= available();
    used_ += is_enough ? bytes : 0;
    return is_enough;
  }
  void giveBack(std::size_t bytes) noexcept {
    used_ -= bytes;
  }

  // Returns the first of `bytes` addresses, a multiple of 2 MiB.
  std::uintptr_t reserveAddresses(std::size_t bytes) noexcept;

 private:
  std::size_t capacity_ = 0;
  bool is_limited_ = true;
  std::size_t used_ = 0;
  std::uintptr_t address_;
};

// Returns the setting `max_split_size_mb` in bytes, or -1.
TORCHEXT_API std::int64_t maxSplitSize();

// Thrown if the device has too little memory for a request.
struct FailedRequest {
  std::size_t bytes;  // requested from the driver
};

// The pools that serve requests: the default pair or a private one.
struct PoolPair {
  explicit PoolPair(PoolId id) : small{StatPool::SMALL_POOL, id}, large{StatPool::LARGE_POOL, id} {}

  BlockPool small;
  BlockPool large;
  int users = 0;
};

// The caching allocator of one device: NOTE [The allocator is simulated]. Not thread-safe.
class TORCHEXT_API CachingAllocator {
 public:
  explicit CachingAllocator(std::uintptr_t first_address);
  C10_DISABLE_COPY_AND_ASSIGN(CachingAllocator);
  ~CachingAllocator();

  // Returns a block of at least `bytes`, which must not be 0. The block stays valid until it is freed. Throws
  // FailedRequest if the device has too little memory, after releasing as much cached memory as PyTorch releases.
  Block* allocate(std::size_t bytes, c10::StreamId stream);

  void free(Block* block);

  // Records that `block` is also used on `stream`.
  void recordStream(Block* block, c10::StreamId stream);

  // Returns the segments that are completely free to the driver.
  void emptyCache();

  // Allocates from the pool `id` until `leavePool()`. Nests. Each call adds a user of the pool, until `releasePool()`.
  // A pool without users keeps its live blocks, and its cached segments are released with those of the default pool.
  void enterPool(PoolId id);
  void leavePool(PoolId id);
  void releasePool(PoolId id);

  // Limits the memory taken from the driver to `fraction` of its capacity.
  void setMemoryFraction(double fraction);

  const AllocatorStats& stats() const noexcept {
    return stats_;
  }
  AllocatorStats& stats() noexcept {
    return stats_;
  }

  DriverMemory& driver() noexcept {
    return driver_;
  }
  const DriverMemory& driver() const noexcept {
    return driver_;
  }

  // Returns the fraction that was set, or 1.
  double memoryFraction() const noexcept {
    return fraction_;
  }

  // Returns the limit in bytes, if one was set.
  std::optional<std::size_t> allowed() const noexcept {
    return allowed_;
  }

  // Returns the blocks that begin a segment, or a mapped part of an expandable segment, sorted by address.
  std::vector<const Block*> segments() const;

  void setObserver(MemoryObserver observer) {
    observer_ = std::move(observer);
  }

 private:
  struct Request {
    std::size_t asked;    // by the program
    std::size_t size;     // `asked`, rounded
    std::size_t segment;  // the size of a new segment for it
    c10::StreamId stream;
    BlockPool* pool;
  };

  Request requestFor(std::size_t bytes, c10::StreamId stream);
  Block* findFree(const Request& request);
  Block* allocateSegment(const Request& request);
  Block* handOut(Block* block, const Request& request);
  void split(Block* block, const Request& request);

  bool mayTake(std::size_t bytes) const noexcept;
  void makeFree(Block* block);
  std::size_t merge(Block* into, Block* neighbor);
  void freeAwaited();
  void collectGarbage();
  bool releaseOversized(const Request& request);
  void releaseUnusedPools();
  void releaseAll(BlockPool& pool);
  void releaseSegment(Block* block);

  Block* allocateExpandable(const Request& request);
  Block* findExpandable(const Request& request);
  bool map(Block* block, std::size_t bytes);
  void unmap(Block* block);
  void releaseExpandable(Block* block);

  Block* newBlock(c10::StreamId stream, std::size_t size, BlockPool& pool, std::uintptr_t address);
  void erase(Block* block);
  void notify(MemoryAction action, std::uintptr_t address, std::size_t bytes, c10::StreamId stream) const;

  DriverMemory driver_;
  AllocatorStats stats_;
  PoolPair pools_{{}};
  std::map<PoolId, PoolPair> private_pools_;
  std::vector<PoolId> entered_pools_;
  std::unordered_set<Block*> blocks_;
  std::list<ExpandableSegment> expandable_;
  std::vector<Block*> awaited_;  // freed, and reusable once the streams that used them are done
  std::optional<std::size_t> allowed_;
  double fraction_ = 1;
  MemoryObserver observer_;
};

}  // namespace torchext
