#include "large_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ScopeExit.h>

#include "locks.h"
#include "sizes.h"

namespace torchext {

namespace {

constexpr std::uintptr_t kPage = std::uintptr_t{1} << 12U;
constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21U;
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
constexpr int kPopulate = 23;  // since Linux 5.14
#endif

// The cost of a block of one kind, in nanoseconds; 0 before the first measurement. Several threads change it at once:
// an update that is lost only delays a choice.
class Estimate {
 public:
  float cost() const noexcept {
    return cost_.load(std::memory_order_relaxed);
  }

  void measured(float cost) noexcept {
    const bool is_first = least_ == 0;
    least_ = is_first ? cost : std::min<float>(least_, cost);
    cost_ = is_first ? cost : (cost_ + cost) / 2;
  }

  void fall() noexcept {
    constexpr float kFall = 0.97F;  // tries a kind that costs twice as much every 23 blocks
    cost_ = std::max<float>(kFall * cost_, least_);
  }

 private:
  std::atomic<float> cost_{0};
  std::atomic<float> least_{0};
};

Estimate of_huge;
Estimate of_small;

// The time of this thread: includes what the host does for it, and excludes other threads on the same processor.
std::int64_t nanoseconds() noexcept {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

bool isPresent(char* page) noexcept {
  unsigned char present = 0;
  return mincore(page, kPage, &present) == 0 && (present & 1U) != 0;
}

// Older systems get a write that changes nothing to each page.
void touch(char* begin, std::size_t nbytes) noexcept {
  if (madvise(begin, nbytes, kPopulate) == 0) {
    return;
  }
  for (std::size_t i = 0; i < nbytes; i += kPage) {
    __atomic_fetch_or(begin + i, 0, __ATOMIC_RELAXED);
  }
}

bool areHugePagesCheaper() noexcept {
  return of_huge.cost() <= of_small.cost();
}

// `madvise` is best effort: if it fails, the memory stays on small pages.
void adviseHuge(char* begin, char* end) noexcept {
  if (begin < end && areHugePagesCheaper()) {
    madvise(begin, toSize(end - begin), MADV_HUGEPAGE);
  }
}

char* roundedDown(char* address, std::uintptr_t unit) noexcept {
  return address - reinterpret_cast<std::uintptr_t>(address) % unit;
}

// Advises the system to back the untouched `nbytes` bytes at `data` with huge pages, unless small ones are expected to
// cost less. Does nothing for less than half a huge page, or where the system has no huge pages. Thread-safe; one
// system call.
void preferHugePages(void* data, std::size_t nbytes) noexcept {
  char* begin = static_cast<char*>(data) + kHugePage / 2;
  // The pages at both ends are shared with neighboring allocations. Each is included if at least half of it belongs to
  // this one: neighbors on the same heap are mostly written at the same time.
  adviseHuge(roundedDown(begin, kHugePage), roundedDown(begin + nbytes, kHugePage));
}

// Does the same only for the huge pages that lie entirely within the `nbytes` bytes. A page at an edge would occupy all
// of its 2 MiB once any byte of it is written; without them the process never uses more memory than requested.
void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept {
  char* begin = static_cast<char*>(data);
  adviseHuge(roundedDown(begin + kHugePage - 1, kHugePage), roundedDown(begin + nbytes, kHugePage));
}

thread_local RecycledMemory* current_memory = nullptr;

// Returns true if a block of `size` bytes fits `nbytes` bytes with at most 25 % waste.
bool fits(std::size_t size, std::size_t nbytes) {
  return size >= nbytes && size - nbytes <= nbytes / 4;
}

}  // namespace

FreshPages::FreshPages(void* data, std::size_t nbytes) noexcept
    : next_{roundedDown(static_cast<char*>(data), kPage)}, end_{static_cast<char*>(data) + nbytes} {
  if (nbytes < kHugePage / 2) {
    next_ = end_;  // not worth the system calls
  }
}

void FreshPages::provideBlock() noexcept {
  char* begin = next_;
  next_ = roundedDown(begin, kHugePage) + kHugePage;
  const auto nbytes = toSize(std::min(next_, end_) - begin);
  if (isPresent(begin)) {
    return;
  }
  const bool is_huge = areHugePagesCheaper();
  madvise(begin, nbytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const std::int64_t start = nanoseconds();
  touch(begin, nbytes);
  if (nbytes >= kHugePage - kPage) {
    (is_huge ? of_huge : of_small).measured(static_cast<float>(nanoseconds() - start));
    (is_huge ? of_small : of_huge).fall();
  }
  if (!is_huge) {
    madvise(begin, nbytes, MADV_HUGEPAGE);  // the system may still join the pages later
  }
}

struct RecycledMemory::Block {
  c10::DataPtr data;
  std::size_t size = 0;
};

// The context of a storage on a block. The block returns to its owner when the storage is freed.
struct RecycledMemory::InUse {
  std::shared_ptr<RecycledMemory> owner;
  Block block;
};

void RecycledMemory::giveBack(void* in_use) {
  const std::unique_ptr<InUse> used{static_cast<InUse*>(in_use)};
  const Locked lock{LockRank::kRecycled};
  used->owner->free_.push_back(std::move(used->block));
}

RecycledMemory::RecycledMemory(std::size_t slack) : slack_{slack} {}

RecycledMemory::~RecycledMemory() = default;

std::shared_ptr<RecycledMemory> RecycledMemory::make(std::size_t slack) {
  return std::shared_ptr<RecycledMemory>{new RecycledMemory{slack}};
}

c10::Storage RecycledMemory::makeStorage(std::size_t nbytes) {
  auto used = std::make_unique<InUse>();
  std::vector<Block> outdated;  // freed without the lock
  {
    const Locked lock{LockRank::kRecycled};
    const auto found =
        std::find_if(free_.begin(), free_.end(), [nbytes](const Block& block) { return fits(block.size, nbytes); });
    if (found != free_.end()) {
      used->block = std::move(*found);
      free_.erase(found);
    } else {
      outdated.swap(free_);  // these sizes are no longer needed
    }
  }
  outdated.clear();
  if (used->block.size == 0) {
    used->block = {c10::GetCPUAllocator()->allocate(nbytes), nbytes};
    preferHugePagesWithin(used->block.data.get(), nbytes);
  }
  used->owner = shared_from_this();
  void* memory = used->block.data.get();
  c10::DataPtr data{memory, used.get(), &giveBack, c10::kCPU};
  used.release();  // NOLINT(bugprone-unused-return-value): now owned by `data`
  return c10::Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, nbytes,
                                                            std::move(data), /*allocator=*/nullptr,
                                                            /*resizable=*/false)};
}

void RecycledMemory::serve(c10::function_ref<void()> compute) {
  const auto restore =
      c10::make_scope_exit([before = std::exchange(current_memory, this)] { current_memory = before; });
  compute();
}

c10::Storage makeLargeStorage(std::size_t nbytes) {
  if (current_memory != nullptr) {
    return current_memory->makeStorage(nbytes);
  }
  const at::Tensor bytes = at::empty({toSigned(nbytes)}, at::TensorOptions().dtype(c10::kByte).device(c10::kCPU));
  preferHugePages(bytes.mutable_data_ptr(), nbytes);
  return bytes.storage();
}

void RecycledMemory::trim() const noexcept {
#if defined(__GLIBC__)
#if __GLIBC_PREREQ(2, 33)
  if (mallinfo2().fordblks <= slack_) {
    return;
  }
#endif
  malloc_trim(0);
#endif
}

}  // namespace torchext
