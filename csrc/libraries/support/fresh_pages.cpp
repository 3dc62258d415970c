#include "fresh_pages.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

#include <sys/mman.h>

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

void preferHugePages(void* data, std::size_t nbytes) noexcept {
  char* begin = static_cast<char*>(data) + kHugePage / 2;
  // The pages at both ends are shared with neighboring allocations. Each is included if at least half of it belongs to
  // this one: neighbors on the same heap are mostly written at the same time.
  adviseHuge(roundedDown(begin, kHugePage), roundedDown(begin + nbytes, kHugePage));
}

void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept {
  char* begin = static_cast<char*>(data);
  adviseHuge(roundedDown(begin + kHugePage - 1, kHugePage), roundedDown(begin + nbytes, kHugePage));
}

}  // namespace torchext
