#pragma once

// NOTE [Guards and blocks]
//
// Whatever holds on a thread for a while is set by a guard: an object whose constructor sets it, and whose destructor
// puts back what was there. C++ uses nothing else.
//
// Other languages enter a block by one call and leave it by another, and cannot be made to do so in pairs: a block may
// be left twice, on another thread, or while a later one is still open, as happens when coroutines or generators that
// hold blocks take turns on a thread. A guard in an object of the language, as PyTorch's `py_context_manager` keeps it,
// would then put back the state of another thread. So the list of what is open belongs to the thread:
//
// - of guards that are all alike, or that are as good as alike because only the innermost counts, `OpenGuards` keeps
//   one for each block, and leaving any block ends the last;
// - where it matters which block is left (`mode_blocks`, `region`), blocks know their owner, which may enter them again
//   while they are open.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <vector>

#include <c10/util/Exception.h>

#include "macros.h"

namespace torchext {

// The guards of one type that this thread has entered and not left. A thread that ends leaves them all.
template <typename Guard>
class OpenGuards {
 public:
  template <typename... Arguments>
  static void enter(const Arguments&... arguments) {
    ofThisThread().guards_.emplace_back(arguments...);
  }

  // Ends the last one. `block` is what the program calls it, for the error where there is none.
  static void leave(const char* block) {
    TORCH_CHECK(leaveIfOpen(), "A block of ", block,
                " was left that is not open on this thread. Leave each block once, on the thread that entered it; a "
                "generator that holds one must be closed there.");
  }

  // Returns false where there is none.
  static bool leaveIfOpen() {
    auto& guards = ofThisThread().guards_;
    if (guards.empty()) {
      return false;
    }
    guards.pop_back();
    return true;
  }

  OpenGuards(const OpenGuards&) = delete;
  OpenGuards& operator=(const OpenGuards&) = delete;
  OpenGuards(OpenGuards&&) = delete;
  OpenGuards& operator=(OpenGuards&&) = delete;
  ~OpenGuards() {
    while (!guards_.empty()) {
      guards_.pop_back();
    }
  }

 private:
  OpenGuards() = default;

  static OpenGuards& ofThisThread() {
    thread_local OpenGuards guards;
    return guards;
  }

  std::list<Guard> guards_;  // which never moves them
};

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
