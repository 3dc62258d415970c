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
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + nbytes) / kHugePage * kHugePage;
  if (begin < end) {
    // A wish: where it is not granted, all is as before.
    static_cast<void>(madvise(static_cast<char*>(data) + (begin - address), end - begin, MADV_HUGEPAGE));
  }
}

#else

void preferHugePages(void* /*data*/, std::size_t /*nbytes*/) noexcept {}

#endif

}  // namespace torchext
