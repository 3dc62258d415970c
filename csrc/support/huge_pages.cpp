#include "huge_pages.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torchext {

#ifdef __linux__

void preferHugePages(void* data, std::size_t nbytes) noexcept {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21U;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  // Pages that are shared with what lies before or behind are the allocator's, too, and count if this has half of them:
  // what comes out of one heap is mostly written together.
  const std::uintptr_t begin = (address + kHugePage / 2) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + nbytes + kHugePage / 2) / kHugePage * kHugePage;
  if (begin < end) {
    // A wish: where it is not granted, or there is no memory, all is as before.
    auto* first = static_cast<char*>(data) + (static_cast<std::intptr_t>(begin) - static_cast<std::intptr_t>(address));
    static_cast<void>(madvise(first, end - begin, MADV_HUGEPAGE));
  }
}

#else

void preferHugePages(void* /*data*/, std::size_t /*nbytes*/) noexcept {}

#endif

}  // namespace torchext
