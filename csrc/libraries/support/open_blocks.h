#pragma once

// NOTE [Guards and blocks]
//
// State that holds on a thread for a while is set by a guard: an object whose constructor sets the state, and whose
// destructor restores the previous one. C++ code always uses a guard.
//
// Other languages enter a block by one call and leave it by another, and nothing forces such calls to pair up. A block
// may be left twice, on another thread, or while a later one is still open. The last case happens when coroutines or
// generators that hold blocks take turns on a thread. If an object of the language held the guard, as PyTorch's
// `py_context_manager` does, leaving would restore the state of another thread. So the list of open blocks belongs to
// the thread, and to the library that enters and leaves them:
//
// - `OpenGuards` keeps one guard per block, and ends them from the last to the first. A block that is left while later
//   ones are open does not affect these; its guard ends after theirs;
// - inference mode and regions (`inference_mode`, `region`) keep separate lists. There, a block that is left hands the
//   state that it found to the next one.
//
// Blocks have an owner where it matters which one is left. An owner may enter a block again while it is open.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <vector>

#include <c10/util/Exception.h>

#include <torchext/macros.h>

namespace torchext {

// Identifies the object that enters and leaves; unique in the life of the process.
using BlockOwner = std::uint64_t;
TORCHEXT_API BlockOwner newBlockOwner() noexcept;

// The owner of blocks that are interchangeable.
constexpr BlockOwner kAnyOwner = 0;

// The guards of one type that this thread has entered and not left. A thread that ends leaves all of them.
template <typename Guard>
class OpenGuards {
 public:
  template <typename... Arguments>
  static void enter(BlockOwner owner, const Arguments&... arguments) {
    ofThisThread().blocks_.emplace_back(owner, arguments...);
  }

  // Leaves the owner's innermost block. Raises if the owner has no open block; `block` is its name in the message.
  static void leave(BlockOwner owner, const char* block) {
    TORCH_CHECK(leaveIfOpen(owner), block,
                " was left on a thread where it is not open. Leave each block once, on the thread that entered it; a "
                "generator that holds one must be closed there.");
  }

  // Returns false if the owner has no open block.
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

  std::list<Block> blocks_;  // a list, so that blocks never move
};

// Returns the last of `blocks` whose member `owner` equals `owner`, or the end.
template <typename Block>
auto innermostOf(std::vector<Block>& blocks, BlockOwner owner) {
  const auto found =
      std::find_if(blocks.rbegin(), blocks.rend(), [owner](const Block& block) { return block.owner == owner; });
  return found == blocks.rend() ? blocks.end() : std::prev(found.base());
}

}  // namespace torchext
