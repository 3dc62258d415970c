#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <utility>

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "allocator_stats.h"

namespace torchext {

struct BlockPool;

// A range of addresses.
struct AddressRange {
  std::uintptr_t begin;
  std::size_t size;
};

// Addresses that get memory page by page, on demand: PyTorch's `expandable_segments:True`. The blocks in the segment
// record which pages have memory.
struct ExpandableSegment {
  std::uintptr_t begin;   // a multiple of `page_size`
  std::size_t page_size;  // in bytes

  std::size_t roundedUp(std::size_t bytes) const noexcept {
    return (bytes + page_size - 1) / page_size * page_size;
  }

  // Returns the whole pages inside `range`, possibly none.
  AddressRange pagesInside(AddressRange range) const noexcept {
    const std::size_t first = roundedUp(range.begin - begin);
    const std::size_t end = (range.begin + range.size - begin) / page_size * page_size;
    return {begin + first, end > first ? end - first : 0};
  }
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

}  // namespace torchext
