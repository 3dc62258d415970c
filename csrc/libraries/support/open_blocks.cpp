#include "open_blocks.h"

#include <atomic>

namespace torchext {

BlockOwner newBlockOwner() noexcept {
  static std::atomic<BlockOwner> next{kAnyOwner + 1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace torchext
