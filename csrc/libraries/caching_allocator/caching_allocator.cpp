#include "caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

#include "../support/sizes.h"

namespace torchext {

using c10::StreamId;
using Settings = c10::CachingAllocator::AcceleratorAllocatorConfig;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGranularity = 512;           // all sizes are multiples of it
constexpr std::size_t kLargestSmall = kMiB;         // the largest size in the small pool
constexpr std::size_t kSmallSegment = 2 * kMiB;     // the segment size of the small pool
constexpr std::size_t kOwnSegment = 10 * kMiB;      // sizes from here on get a segment per request
constexpr std::size_t kSegmentMultiple = 2 * kMiB;  // the size of such a segment is a multiple of this

std::size_t roundedUp(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Rounds up to one of `divisions` steps between two powers of two, as `roundup_power2_next_division()` does.
std::size_t roundedToDivision(std::size_t bytes, std::size_t divisions) {
  if (c10::llvm::isPowerOf2_64(bytes)) {
    return bytes;
  }
  const std::size_t power = std::size_t{1} << (63 - c10::llvm::countLeadingZeros(bytes));
  const std::size_t step = power >> (63 - c10::llvm::countLeadingZeros(divisions));
  return step == 0 ? 2 * power : roundedUp(bytes, step);
}

// `round_size()`
std::size_t roundedSize(std::size_t bytes) {
  if (bytes < kGranularity) {
    return kGranularity;
  }
  const std::size_t divisions = Settings::roundup_power2_divisions(bytes);
  return divisions > 1 && bytes > kGranularity * divisions ? roundedToDivision(bytes, divisions)
                                                           : roundedUp(bytes, kGranularity);
}

// `get_allocation_size()`
std::size_t segmentSize(std::size_t size) {
  if (size <= kLargestSmall) {
    return kSmallSegment;
  }
  return size < kOwnSegment ? Settings::large_segment_size() : roundedUp(size, kSegmentMultiple);
}

bool isOversize(std::size_t size) {
  return size >= Settings::max_split_size();
}

// `should_split()`
bool isWorthSplitting(const Block& block, std::size_t size) {
  const std::size_t rest = block.size - size;
  return block.pool->isSmall() || Settings::use_expandable_segments() ? rest >= kGranularity
                                                                      : !isOversize(size) && rest > kLargestSmall;
}

// The size to which an expandable block can grow.
std::size_t expandableSize(const Block& block) {
  return block.size + (block.next != nullptr && !block.next->is_mapped ? block.next->size : 0);
}

void increase(PooledStat& stat, StatPool pool, std::size_t amount) {
  stat.front().increase(amount);
  stat[static_cast<std::size_t>(pool)].increase(amount);
}

void decrease(PooledStat& stat, StatPool pool, std::size_t amount) {
  stat.front().decrease(amount);
  stat[static_cast<std::size_t>(pool)].decrease(amount);
}

void insertAfter(Block* block, Block* previous, Block* next) {
  block->previous = previous;
  block->next = next;
  if (previous != nullptr) {
    previous->next = block;
  }
  if (next != nullptr) {
    next->previous = block;
  }
}

}  // namespace

std::int64_t maxSplitSize() {
  return Settings::max_split_size() == std::numeric_limits<std::size_t>::max() ? -1
                                                                               : toSigned(Settings::max_split_size());
}

std::uintptr_t DriverMemory::reserveAddresses(std::size_t bytes) noexcept {
  return std::exchange(address_, address_ + roundedUp(bytes, kSegmentMultiple));
}

CachingAllocator::CachingAllocator(std::uintptr_t first_address) : driver_{first_address} {}

CachingAllocator::~CachingAllocator() {
  for (Block* block : blocks_) {
    delete block;
  }
}

Block* CachingAllocator::allocate(std::size_t bytes, StreamId stream) {
  freeAwaited();
  const Request request = requestFor(bytes, stream);
  Block* block = findFree(request);
  if (block == nullptr) {
    if (allowed_ && Settings::garbage_collection_threshold() > 0) {
      collectGarbage();
    }
    block = allocateSegment(request);
  }
  if (block == nullptr && releaseOversized(request)) {
    block = allocateSegment(request);
  }
  if (block == nullptr) {
    emptyCache();
    ++stats_.num_alloc_retries;
    block = allocateSegment(request);
  }
  if (block == nullptr) {
    notify(MemoryAction::kOutOfMemory, driver_.available(), request.size, stream);
    ++stats_.num_ooms;
    throw FailedRequest{request.segment};
  }
  return handOut(block, request);
}

CachingAllocator::Request CachingAllocator::requestFor(std::size_t bytes, StreamId stream) {
  const std::size_t size = roundedSize(bytes);
  PoolPair& pools = entered_pools_.empty() ? pools_ : private_pools_.at(entered_pools_.back());
  return {bytes, size, segmentSize(size), stream, size <= kLargestSmall ? &pools.small : &pools.large};
}

// `get_free_block()`
Block* CachingAllocator::findFree(const Request& request) {
  BlockPool& pool = *request.pool;
  if (allowed_ && Settings::garbage_collection_threshold() > 0) {
    ++pool.searches;
  }
  Block key{request.stream, request.size, pool, 0};
  auto found = pool.free.lower_bound(&key);
  const auto is_end = [&](auto position) {
    return position == pool.free.end() || (*position)->stream != request.stream;
  };
  if (is_end(found)) {
    return nullptr;
  }
  if ((*found)->segment != nullptr) {
    if (Settings::use_expandable_segments()) {
      // The best fit among blocks that can grow is the one that can grow least.
      for (auto next = std::next(found);
           (*found)->segment != nullptr && !is_end(next) && expandableSize(**next) < expandableSize(**found); ++next) {
        found = next;
      }
    } else {
      do {
        ++found;
      } while (!is_end(found) && (*found)->segment != nullptr);
      if (is_end(found)) {
        return nullptr;
      }
    }
  }
  Block* block = *found;
  const bool is_wasteful = isOversize(request.size)
                               ? block->size >= request.size + Settings::max_non_split_rounding_size()
                               : isOversize(block->size);
  if (is_wasteful) {
    return nullptr;
  }
  pool.free.erase(found);
  return block;
}

bool CachingAllocator::mayTake(std::size_t bytes) const noexcept {
  return !allowed_ || driver_.used() + bytes <= *allowed_;
}

// `alloc_block()`
Block* CachingAllocator::allocateSegment(const Request& request) {
  if (!mayTake(request.segment)) {
    return nullptr;
  }
  if (Settings::use_expandable_segments()) {
    return allocateExpandable(request);
  }
  if (!driver_.take(request.segment)) {
    return nullptr;
  }
  Block* block = newBlock(request.stream, request.segment, *request.pool, driver_.reserveAddresses(request.segment));
  increase(stats_.segment, request.pool->kind, 1);
  increase(stats_.reserved_bytes, request.pool->kind, block->size);
  if (isOversize(block->size)) {
    stats_.oversize_segments.increase(1);
  }
  ++stats_.num_device_alloc;
  notify(MemoryAction::kSegmentAlloc, block->address, block->size, block->stream);
  return block;
}

// `alloc_found_block()`
Block* CachingAllocator::handOut(Block* block, const Request& request) {
  const StatPool kind = request.pool->kind;
  if (isWorthSplitting(*block, request.size)) {
    split(block, request);
  } else if (block->isSplit() && block->segment == nullptr) {
    decrease(stats_.inactive_split_bytes, kind, block->size);
    decrease(stats_.inactive_split, kind, 1);
  }
  block->is_allocated = true;
  block->requested = request.asked;
  increase(stats_.allocation, kind, 1);
  increase(stats_.allocated_bytes, kind, block->size);
  increase(stats_.active, kind, 1);
  increase(stats_.active_bytes, kind, block->size);
  increase(stats_.requested_bytes, kind, block->requested);
  if (isOversize(block->size)) {
    stats_.oversize_allocations.increase(1);
  }
  notify(MemoryAction::kAlloc, block->address, block->requested, block->stream);
  return block;
}

// Leaves the first bytes of `block` to the request, and makes the rest a free block.
void CachingAllocator::split(Block* block, const Request& request) {
  const StatPool kind = request.pool->kind;
  const bool was_split = block->isSplit();
  Block* rest = newBlock(block->stream, block->size - request.size, *block->pool, block->address + request.size);
  rest->segment = block->segment;
  rest->requested = block->requested;
  insertAfter(rest, block, block->next);
  block->size = request.size;
  block->pool->insert(rest);
  if (block->segment != nullptr) {
    return;  // PyTorch counts no inactive blocks of expandable segments
  }
  if (was_split) {
    decrease(stats_.inactive_split_bytes, kind, block->size);
  } else {
    increase(stats_.inactive_split_bytes, kind, rest->size);
    increase(stats_.inactive_split, kind, 1);
  }
}

void CachingAllocator::free(Block* block) {
  const StatPool kind = block->pool->kind;
  block->is_allocated = false;
  decrease(stats_.allocation, kind, 1);
  decrease(stats_.allocated_bytes, kind, block->size);
  if (isOversize(block->size)) {
    stats_.oversize_allocations.decrease(1);
  }
  notify(MemoryAction::kFreeRequested, block->address, block->requested, block->stream);
  if (block->used_on.empty()) {
    makeFree(block);
  } else {
    block->used_on.clear();
    block->is_awaited = true;
    awaited_.push_back(block);
  }
}

void CachingAllocator::recordStream(Block* block, StreamId stream) {
  if (stream != block->stream &&
      std::find(block->used_on.begin(), block->used_on.end(), stream) == block->used_on.end()) {
    block->used_on.push_back(stream);
  }
}

// `free_block()`
void CachingAllocator::makeFree(Block* block) {
  const StatPool kind = block->pool->kind;
  notify(MemoryAction::kFreeCompleted, block->address, block->requested, block->stream);
  const std::size_t size = block->size;
  const std::size_t requested = block->requested;
  std::int64_t split_blocks = 0;
  std::int64_t split_bytes = 0;
  for (Block* neighbor : {block->previous, block->next}) {
    if (const std::size_t merged = merge(block, neighbor)) {
      split_blocks -= 1;
      split_bytes -= toSigned(merged);
    }
  }
  block->pool->insert(block);
  if (block->isSplit()) {
    split_blocks += 1;
    split_bytes += toSigned(block->size);
  }
  if (block->segment == nullptr) {
    const auto change = [kind](PooledStat& stat, std::int64_t amount) {
      if (amount > 0) {
        increase(stat, kind, toSize(amount));
      } else if (amount < 0) {
        decrease(stat, kind, toSize(-amount));
      }
    };
    change(stats_.inactive_split, split_blocks);
    change(stats_.inactive_split_bytes, split_bytes);
  }
  decrease(stats_.active, kind, 1);
  decrease(stats_.active_bytes, kind, size);
  decrease(stats_.requested_bytes, kind, requested);
}

// `try_merge_blocks()`: destroys `neighbor` and returns its size, or returns 0 if it cannot be merged.
std::size_t CachingAllocator::merge(Block* into, Block* neighbor) {
  if (neighbor == nullptr || !neighbor->isFree() || into->is_mapped != neighbor->is_mapped) {
    return 0;
  }
  if (into->previous == neighbor) {
    into->address = neighbor->address;
    into->previous = neighbor->previous;
    if (into->previous != nullptr) {
      into->previous->next = into;
    }
  } else {
    into->next = neighbor->next;
    if (into->next != nullptr) {
      into->next->previous = into;
    }
  }
  const std::size_t size = neighbor->size;
  into->size += size;
  if (neighbor->is_mapped) {
    neighbor->pool->free.erase(neighbor);
  } else {
    neighbor->pool->unmapped.erase(neighbor);
  }
  erase(neighbor);
  return size;
}

// `process_events()`. There is no stream work to wait for.
void CachingAllocator::freeAwaited() {
  for (Block* block : std::exchange(awaited_, {})) {
    block->is_awaited = false;
    makeFree(block);
  }
}

// `beginAllocateToPool()`
void CachingAllocator::enterPool(PoolId id) {
  ++private_pools_.try_emplace(id, id).first->second.users;
  entered_pools_.push_back(id);
}

// `endAllocateToPool()`
void CachingAllocator::leavePool(PoolId id) {
  const auto found = std::find(entered_pools_.rbegin(), entered_pools_.rend(), id);
  if (found != entered_pools_.rend()) {
    entered_pools_.erase(std::next(found).base());
  }
}

void CachingAllocator::releasePool(PoolId id) {
  const auto found = private_pools_.find(id);
  if (found != private_pools_.end() && found->second.users > 0) {
    --found->second.users;
  }
}

void CachingAllocator::setMemoryFraction(double fraction) {
  fraction_ = fraction;
  allowed_ = static_cast<std::size_t>(fraction * static_cast<double>(driver_.capacity()));
}

// `garbage_collect_cached_blocks()`
void CachingAllocator::collectGarbage() {
  const auto threshold =
      static_cast<std::size_t>(Settings::garbage_collection_threshold() * static_cast<double>(*allowed_));
  if (driver_.used() <= threshold) {
    return;
  }
  const std::size_t target = driver_.used() - threshold;
  std::size_t reclaimed = 0;
  std::uint64_t total_age = 0;
  int freeable = 0;
  for (const Block* block : pools_.large.free) {
    if (!block->isSplit()) {
      total_age += pools_.large.ageOf(*block);
      ++freeable;
    }
  }
  bool has_freed = freeable > 0;
  while (reclaimed < target && has_freed && freeable > 0) {
    const double average = static_cast<double>(total_age) / freeable;
    has_freed = false;
    for (auto position = pools_.large.free.begin(); position != pools_.large.free.end();) {
      Block* block = *position++;
      if (!block->isSplit() && block->segment == nullptr &&
          static_cast<double>(pools_.large.ageOf(*block)) >= average) {
        has_freed = true;
        reclaimed += block->size;
        total_age -= pools_.large.ageOf(*block);
        --freeable;
        releaseSegment(block);
      }
    }
  }
}

// `release_available_cached_blocks()`: with `max_split_size_mb`, releases as few oversize blocks as the request needs.
bool CachingAllocator::releaseOversized(const Request& request) {
  const std::size_t limit = Settings::max_split_size();
  if (limit == std::numeric_limits<std::size_t>::max()) {
    return false;
  }
  BlockPool& pool = *request.pool;
  Block key{request.stream, std::max(request.size, limit), pool, 0};
  auto found = pool.free.lower_bound(&key);
  if (found != pool.free.end() && (*found)->stream == request.stream && (*found)->segment == nullptr) {
    releaseSegment(*found);
    return true;
  }
  std::size_t released = 0;
  while (released < key.size && found != pool.free.begin()) {
    Block* block = *std::prev(found);
    if (!isOversize(block->size) || block->stream != request.stream) {
      break;
    }
    if (block->segment != nullptr) {
      --found;
      continue;
    }
    released += block->size;
    releaseSegment(block);  // `found` stays valid: it comes after `block`
  }
  return released >= key.size;
}

// `release_cached_blocks()`
void CachingAllocator::emptyCache() {
  ++stats_.num_sync_all_streams;
  freeAwaited();
  releaseAll(pools_.large);
  releaseAll(pools_.small);
  releaseUnusedPools();
}

void CachingAllocator::releaseUnusedPools() {
  for (auto position = private_pools_.begin(); position != private_pools_.end();) {
    PoolPair& pools = position->second;
    if (pools.users > 0) {
      ++position;
      continue;
    }
    releaseAll(pools.large);
    releaseAll(pools.small);
    const bool is_empty = std::none_of(blocks_.begin(), blocks_.end(), [&pools](const Block* block) {
      return block->pool == &pools.small || block->pool == &pools.large;
    });
    position = is_empty ? private_pools_.erase(position) : std::next(position);
  }
}

void CachingAllocator::releaseAll(BlockPool& pool) {
  std::vector<Block*> to_unmap;
  for (auto position = pool.free.begin(); position != pool.free.end();) {
    Block* block = *position++;
    if (block->segment != nullptr) {
      to_unmap.push_back(block);
    } else if (!block->isSplit()) {
      releaseSegment(block);
    }
  }
  for (Block* block : to_unmap) {
    unmap(block);
    if (!block->isSplit()) {
      releaseExpandable(block);
    }
  }
}

void CachingAllocator::releaseSegment(Block* block) {
  ++stats_.num_device_free;
  notify(MemoryAction::kSegmentFree, block->address, block->size, block->stream);
  driver_.giveBack(block->size);
  decrease(stats_.segment, block->pool->kind, 1);
  decrease(stats_.reserved_bytes, block->pool->kind, block->size);
  if (isOversize(block->size)) {
    stats_.oversize_segments.decrease(1);
  }
  block->pool->free.erase(block);
  erase(block);
}

// `try_allocate_expandable_block()`
Block* CachingAllocator::allocateExpandable(const Request& request) {
  Block* block = findExpandable(request);
  if (!block->is_mapped && !map(block, std::min(block->size, request.size))) {
    return nullptr;
  }
  while (block->size < request.size) {
    // The next block has no memory yet. `map()` merges it with the block before it, into the newly mapped block.
    Block* next = block->next;
    if (!map(next, std::min(request.size - block->size, next->size))) {
      return nullptr;
    }
    block = next;
  }
  request.pool->free.erase(block);
  return block;
}

// `find_expandable_block()`: the lowest addresses with enough space, in blocks that are free or without memory.
Block* CachingAllocator::findExpandable(const Request& request) {
  BlockPool& pool = *request.pool;
  const auto has_room = [&request](const Block* block) {
    std::size_t bytes = 0;
    for (; bytes < request.size && block != nullptr && block->isFree(); block = block->next) {
      bytes += block->size;
    }
    return bytes >= request.size;
  };
  Block key{request.stream, 0, pool, 0};
  for (auto position = pool.unmapped.lower_bound(&key);
       position != pool.unmapped.end() && (*position)->stream == request.stream; ++position) {
    Block* block = *position;
    if (block->previous != nullptr && block->previous->isFree()) {
      block = block->previous;
    }
    if (has_room(block)) {
      return block;
    }
  }
  // PyTorch reserves an eighth more addresses than the device has memory, as space for pages that have to move.
  const std::size_t page = pool.isSmall() ? kSmallSegment : Settings::large_segment_size();
  const std::size_t size =
      roundedUp(std::max(driver_.capacity() + driver_.capacity() / 8, driver_.isLimited() ? 0 : request.size), page);
  expandable_.push_back({driver_.reserveAddresses(size), page});
  Block* block = newBlock(request.stream, size, pool, expandable_.back().begin);
  block->is_mapped = false;
  block->segment = &expandable_.back();
  pool.unmapped.insert(block);
  return block;
}

// `map_block()`
bool CachingAllocator::map(Block* block, std::size_t bytes) {
  const std::size_t size = roundedUp(bytes, block->segment->page_size);
  if (!driver_.take(size)) {
    return false;
  }
  BlockPool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->is_mapped = true;
  if (size < block->size) {
    Block* rest = newBlock(block->stream, block->size - size, pool, block->address + size);
    rest->is_mapped = false;
    rest->segment = block->segment;
    insertAfter(rest, block, block->next);
    pool.unmapped.insert(rest);
    block->size = size;
  }
  notify(MemoryAction::kSegmentMap, block->address, size, block->stream);
  merge(block, block->previous);
  merge(block, block->next);
  pool.insert(block);
  increase(stats_.reserved_bytes, pool.kind, size);
  ++stats_.num_device_alloc;
  return true;
}

// `unmap_block()`
void CachingAllocator::unmap(Block* block) {
  // Only whole pages lose their memory.
  const std::size_t page = block->segment->page_size;
  const std::size_t offset = block->address - block->segment->begin;
  const std::size_t before = roundedUp(offset, page) - offset;
  const std::size_t after = (offset + block->size) % page;
  if (before + after >= block->size) {
    return;
  }
  const std::size_t size = block->size - before - after;
  const std::uintptr_t begin = block->address + before;
  BlockPool& pool = *block->pool;
  pool.free.erase(block);
  const auto keep = [&](std::size_t bytes, std::uintptr_t address, Block* previous, Block* next) {
    if (bytes > 0) {
      Block* kept = newBlock(block->stream, bytes, pool, address);
      kept->segment = block->segment;
      insertAfter(kept, previous, next);
      pool.insert(kept);
    }
  };
  keep(before, block->address, block->previous, block);
  keep(after, begin + size, block, block->next);
  block->address = begin;
  block->size = size;
  block->is_mapped = false;
  merge(block, block->previous);
  merge(block, block->next);
  pool.unmapped.insert(block);
  driver_.giveBack(size);
  decrease(stats_.reserved_bytes, pool.kind, size);
  ++stats_.num_device_free;
  notify(MemoryAction::kSegmentUnmap, begin, size, block->stream);
}

void CachingAllocator::releaseExpandable(Block* block) {
  if (block->is_mapped) {
    return;
  }
  const ExpandableSegment* segment = block->segment;
  block->pool->unmapped.erase(block);
  erase(block);
  expandable_.remove_if([segment](const ExpandableSegment& other) { return &other == segment; });
}

std::vector<const Block*> CachingAllocator::segments() const {
  std::vector<const Block*> first;
  std::copy_if(blocks_.begin(), blocks_.end(), std::back_inserter(first), [](const Block* block) {
    return block->is_mapped && (block->previous == nullptr || !block->previous->is_mapped);
  });
  std::sort(first.begin(), first.end(), [](const Block* a, const Block* b) { return a->address < b->address; });
  return first;
}

Block* CachingAllocator::newBlock(StreamId stream, std::size_t size, BlockPool& pool, std::uintptr_t address) {
  return *blocks_.insert(new Block{stream, size, pool, address}).first;
}

void CachingAllocator::erase(Block* block) {
  blocks_.erase(block);
  delete block;
}

void CachingAllocator::notify(MemoryAction action, std::uintptr_t address, std::size_t bytes, StreamId stream) const {
  if (observer_) {
    observer_(action, address, bytes, stream);
  }
}

}  // namespace torchext
