#pragma once

// Blocks that other languages enter by one call and leave by another. Guards cannot be torn apart; these can: a block
// may be left twice, or on another thread, or while a later one is still open, as happens when coroutines or generators
// that hold blocks take turns on a thread. So what is to be restored is kept by thread, in a list of the blocks that
// are open, and not in the objects of those languages. These may so be entered again while they are open.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "macros.h"

namespace torchext {

// Who enters and leaves; never the same for two objects in the life of the process.
using BlockOwner = std::uint64_t;
TORCHEXT_API BlockOwner newBlockOwner() noexcept;

// The last of `blocks`, whose members `owner` tell who entered them, that `owner` has entered; the end if there is
// none.
template <typename Block>
auto innermostOf(std::vector<Block>& blocks, BlockOwner owner) {
  const auto found =
      std::find_if(blocks.rbegin(), blocks.rend(), [owner](const Block& block) { return block.owner == owner; });
  return found == blocks.rend() ? blocks.end() : std::prev(found.base());
}

}  // namespace torchext
