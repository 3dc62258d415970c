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
class ExpandableSegment;

// A piece of a segment that the simulated allocator holds: in use, free, or (in an expandable segment) without memory.
// The pieces of a segment are a list, in the order of their addresses.
struct Block {
  Block(c10::StreamId for_stream, std::size_t of_size, BlockPool& of_pool, std::uintptr_t at_address)
      : stream{for_stream}, size{of_size}, pool{&of_pool}, address{at_address} {}

  c10::StreamId stream;                        // for which it was allocated, and which alone may get it
  std::size_t size;                            // in bytes
  std::size_t requested = 0;                   // the bytes that were asked for when it was last allocated
  BlockPool* pool;                             // where it is while it is free
  std::uintptr_t address;                      // in an address space that nobody reads
  Block* previous = nullptr;                   // the neighbours in the segment
  Block* next = nullptr;                       //
  bool is_allocated = false;                   //
  bool is_mapped = true;                       // false for the part of an expandable segment that has no memory
  bool is_awaited = false;                     // freed, while other streams may still use it
  std::uint64_t age_base = 0;                  // see BlockPool::searches
  ExpandableSegment* segment = nullptr;        // the expandable segment, if it is in one
  c10::SmallVector<c10::StreamId, 1> used_on;  // the other streams that `record_stream()` has named

  bool isSplit() const noexcept {
    return previous != nullptr || next != nullptr;
  }

  bool isFree() const noexcept {
    return !is_allocated && !is_awaited;
  }
};

// Orders blocks as the search for the best fit needs them.
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

// Names a pool as PyTorch's `MempoolId_t` does: zeros for that of all programs, and the numbers of
// `torch.cuda.graph_pool_handle()` or `MemPool.id` for others.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// The blocks that are free: PyTorch keeps small and large ones apart.
struct BlockPool {
  BlockPool(StatPool of_kind, PoolId of_id) : kind{of_kind}, id{of_id} {}

  StatPool kind;
  PoolId id;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
  // How often a block has been looked for. What a block has missed of them since it became free is its age.
  std::uint64_t searches = 0;

  bool isSmall() const noexcept {
    return kind == StatPool::kSmall;
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
