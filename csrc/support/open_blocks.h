#pragma once

// NOTE [Guards and blocks]
//
// Whatever holds on a thread for a while is set by a guard: an object whose constructor sets it, and whose destructor
// puts back what was there. C++ enters nothing without one.
//
// Other languages enter a block by one call and leave it by another, and cannot be made to do so in pairs: a block may
// be left twice, on another thread, or while a later one is still open, as happens when coroutines or generators that
// hold blocks take turns on a thread. A guard in an object of the language, as PyTorch's `py_context_manager` keeps it,
// would then put back the state of another thread. So the list of what is open belongs to the thread:
//
// - `OpenGuards` keeps one guard for each block, and ends them from the last to the first. A block that is left while
//   later ones are open leaves these in force; its guard ends after theirs;
// - inference mode and regions (`mode_blocks`, `region`) have lists of their own: there a block that is left hands over
//   what it has found to the next one.
//
// Blocks have an owner where it matters which of them is left. It may enter them again while they are open.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <vector>

#include <c10/util/Exception.h>

#include <torchext/macros.h>

namespace torchext {

// Who enters and leaves; never the same for two objects in the life of the process.
using BlockOwner = std::uint64_t;
TORCHEXT_API BlockOwner newBlockOwner() noexcept;

// Of blocks that are all alike.
constexpr BlockOwner kAnybody = 0;

// The guards of one type that this thread has entered and not left. A thread that ends leaves them all.
template <typename Guard>
class OpenGuards {
 public:
  template <typename... Arguments>
  static void enter(BlockOwner owner, const Arguments&... arguments) {
    ofThisThread().blocks_.emplace_back(owner, arguments...);
  }

  // Leaves the owner's innermost block. `block` is what the program calls it, for the error where there is none.
  static void leave(BlockOwner owner, const char* block) {
    TORCH_CHECK(leaveIfOpen(owner), block,
                " was left on a thread where it is not open. Leave each block once, on the thread that entered it; a "
                "generator that holds one must be closed there.");
  }

  // Returns false where there is none.
  static bool leaveIfOpen(BlockOwner owner) {
    auto& blocks = ofThisThread().blocks_;
    const auto found = std::find_if(blocks.rbegin(), blocks.rend(),
                                    [owner](const Block& block) { return block.owner == owner && !block.is_left; });
    if (found == blocks.rend()) {
      return false;
    }
    found->is_left = true;
    while (!blocks.empty() && blocks.back().is_left) {
      blocks.pop_back();
    }
    return true;
  }

  C10_DISABLE_COPY_AND_ASSIGN(OpenGuards);
  ~OpenGuards() {
    while (!blocks_.empty()) {
      blocks_.pop_back();
    }
  }

 private:
  struct Block {
    template <typename... Arguments>
    explicit Block(BlockOwner entered_by, const Arguments&... arguments) : owner{entered_by}, guard{arguments...} {}

    BlockOwner owner;
    bool is_left = false;
    Guard guard;
  };

  OpenGuards() = default;

  static OpenGuards& ofThisThread() {
    thread_local OpenGuards guards;
    return guards;
  }

  std::list<Block> blocks_;  // which never moves them
};

// The last of `blocks`, whose members `owner` tell who entered them, that `owner` has entered; the end if there is
// none.
template <typename Block>
auto innermostOf(std::vector<Block>& blocks, BlockOwner owner) {
  const auto found =
      std::find_if(blocks.rbegin(), blocks.rend(), [owner](const Block& block) { return block.owner == owner; });
  return found == blocks.rend() ? blocks.end() : std::prev(found.base());
}

}  // namespace torchext
