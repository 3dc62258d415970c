#include "huge_pages.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torchext {

#ifdef __linux__

namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21U;

// `madvise` is best effort: if it fails, the memory stays on small pages.
void advise(void* data, std::uintptr_t begin, std::uintptr_t end) noexcept {
  if (begin < end) {
    const auto offset = static_cast<std::intptr_t>(begin) - reinterpret_cast<std::intptr_t>(data);
    static_cast<void>(madvise(static_cast<char*>(data) + offset, end - begin, MADV_HUGEPAGE));
  }
}

}  // namespace

void preferHugePages(void* data, std::size_t nbytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  // The pages at both ends are shared with neighboring allocations. Each is included if at least half of it belongs to
  // this one: neighbors on the same heap are mostly written at the same time.
  advise(data, (address + kHugePage / 2) / kHugePage * kHugePage,
         (address + nbytes + kHugePage / 2) / kHugePage * kHugePage);
}

void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  advise(data, (address + kHugePage - 1) / kHugePage * kHugePage, (address + nbytes) / kHugePage * kHugePage);
}

#else

void preferHugePages(void* /*data*/, std::size_t /*nbytes*/) noexcept {}
void preferHugePagesWithin(void* /*data*/, std::size_t /*nbytes*/) noexcept {}

#endif

}  // namespace torchext
