#pragma once

// NOTE [The allocator is simulated]
//
// What a program needs on a GPU is what PyTorch's caching allocator takes from the driver, and that depends on the
// order of all allocations and frees, on how they are rounded, and on which free block is split for which request. So
// the allocator is simulated, by the rules of CUDACachingAllocator.cpp, on addresses without memory:
//
//   * sizes are rounded to 512 bytes, or as `roundup_power2_divisions` says;
//   * up to 1 MiB they come from segments of 2 MiB, the small pool; below 10 MiB from segments of 20 MiB, and above
//   from
//     segments of their own, rounded to 2 MiB, the large pool;
//   * of the free blocks of the stream the smallest that suffices is taken, of equal ones that with the lowest address,
//     and what remains of it is split off if it is worth it;
//   * a freed block is merged with its free neighbours. If other streams have used it, it is free when they are done:
//     at once, here, because there is no work to wait for;
//   * when the driver has no more memory, free segments are given back to it, and the request is tried again;
//   * CUDA graphs and `torch.cuda.use_mem_pool()` allocate from pools of their own, whose segments serve nothing else
//     and stay until the last graph of the pool is gone.
//
// The settings are PyTorch's own: `PYTORCH_ALLOC_CONF` as PyTorch parses it, and what sets them later. Not simulated:
// `backend:cudaMallocAsync`, and pools with another allocator (`torch.cuda.MemPool(allocator)`).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <torchext/macros.h>

#include "allocator_stats.h"
#include "block.h"
#include "expandable_segment.h"

namespace torchext {

// What the allocator does, as `torch.cuda.memory._snapshot()` names it.
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

// Told of each action: the address, the bytes (as they were asked for, where there is a difference) and the stream.
using MemoryObserver =
    std::function<void(MemoryAction action, std::uintptr_t address, std::size_t bytes, c10::StreamId stream)>;

// The memory that the driver has for the allocator. Its addresses are handed out in their order, and never again.
class DriverMemory {
 public:
  explicit DriverMemory(std::uintptr_t first_address) : address_{first_address} {}

  std::size_t capacity() const noexcept {
    return capacity_;
  }

  // Past an `is_limited` capacity nothing can be taken.
  void setCapacity(std::size_t capacity, bool is_limited) noexcept {
    capacity_ = capacity;
    is_limited_ = is_limited;
  }

  bool isLimited() const noexcept {
    return is_limited_;
  }

  // Returns what is left. None, where more is in use than the device is now said to have.
  std::size_t available() const noexcept {
    return capacity_ > used_ ? capacity_ - used_ : 0;
  }

  std::size_t used() const noexcept {
    return used_;
  }

  // Returns false, and takes nothing, if there is not enough.
  bool take(std::size_t bytes) noexcept;
  void giveBack(std::size_t bytes) noexcept;

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

// A request that the device has no memory for.
struct FailedRequest {
  std::size_t bytes;  // what was asked of the driver
};

// What a request may be served from.
struct PoolPair {
  explicit PoolPair(PoolId id) : small{StatPool::kSmall, id}, large{StatPool::kLarge, id} {}

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

  // Returns a block of at least `bytes`, which is not 0. It stays valid until it is freed. Throws FailedRequest when
  // the device has too little memory left; then as much of what was cached has been given back as PyTorch gives back.
  Block* allocate(std::size_t bytes, c10::StreamId stream);

  void free(Block* block);

  // `block` is used on `stream`, too.
  void recordStream(Block* block, c10::StreamId stream);

  // Gives the segments that are free as a whole back to the driver.
  void emptyCache();

  // What is allocated from now on comes from the pool `id`, until `leavePool()`. Nests. Each call makes one more user
  // of the pool, until `releasePool()`: without users it keeps what is allocated, and gives back what is cached when
  // the default pool does.
  void enterPool(PoolId id);
  void leavePool(PoolId id);
  void releasePool(PoolId id);

  // Limits what may be taken from the driver to `fraction` of its capacity.
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

  // Returns the fraction that it was limited to; 1 if it was not.
  double memoryFraction() const noexcept {
    return fraction_;
  }

  // Returns what the program may take, in bytes, if it was limited.
  std::optional<std::size_t> allowed() const noexcept {
    return allowed_;
  }

  // Returns all blocks that begin a segment, or a part of an expandable segment that has memory, by address.
  std::vector<const Block*> segments() const;

  void setObserver(MemoryObserver observer) {
    observer_ = std::move(observer);
  }

 private:
  struct Request {
    std::size_t asked;    // by the program
    std::size_t size;     // the same, rounded
    std::size_t segment;  // the size of a new segment for it
    c10::StreamId stream;
    BlockPool* pool;
  };

  Request requestFor(std::size_t bytes, c10::StreamId stream);
  Block* findFree(const Request& request);
  Block* allocateSegment(const Request& request, bool is_retry);
  Block* hand(Block* block, const Request& request);
  void split(Block* block, const Request& request);

  bool mayTake(std::size_t bytes) const noexcept;
  void makeFree(Block* block);
  std::size_t merge(Block* into, Block* neighbour);
  void freeAwaited();
  void collectGarbage();
  bool releaseOversized(const Request& request);
  void releaseCached();
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
  void tell(MemoryAction action, std::uintptr_t address, std::size_t bytes, c10::StreamId stream) const;

  DriverMemory driver_;
  AllocatorStats stats_;
  PoolPair pools_{{}};
  std::map<PoolId, PoolPair> private_pools_;
  std::vector<PoolId> entered_pools_;
  std::unordered_set<Block*> blocks_;
  std::list<ExpandableSegment> expandable_;
  std::vector<Block*> awaited_;  // freed, and to be free when the streams that used them are done
  std::optional<std::size_t> allowed_;
  double fraction_ = 1;
  MemoryObserver observer_;
};

}  // namespace torchext
