#include "mode_blocks.h"

#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "thread_mode.h"

namespace torchext {

namespace {

struct OpenBlock {
  BlockOwner owner;
  ThreadMode previous;
};

using OpenBlocks = std::vector<OpenBlock>;

// The innermost block is the last.
OpenBlocks& openBlocks() {
  thread_local OpenBlocks blocks;
  return blocks;
}

// Removes `block`. The next inner block inherits the state that `block` would restore.
void leave(OpenBlocks& blocks, OpenBlocks::iterator block) {
  const auto next = std::next(block);
  if (next == blocks.end()) {
    block->previous.makeCurrent();
  } else {
    next->previous = std::move(block->previous);
  }
  blocks.erase(block);
}

ThreadMode modeOf(ModeBlock kind, const ThreadMode& current) {
  return kind == ModeBlock::kNormalTensors ? current.normalTensors() : current.inference(kind == ModeBlock::kInference);
}

}  // namespace

void enterModeBlock(BlockOwner owner, ModeBlock kind) {
  OpenBlocks& blocks = openBlocks();
  blocks.push_back({owner, ThreadMode::current()});
  modeOf(kind, blocks.back().previous).makeCurrent();
}

void leaveModeBlock(BlockOwner owner) {
  OpenBlocks& blocks = openBlocks();
  const auto block = innermostOf(blocks, owner);
  TORCH_CHECK(
      block != blocks.end(),
      "Cannot leave a block of inference_mode() or normal_tensors() that is not open on this thread. Leave each block "
      "once, on the thread that entered it. Close a generator that holds one on the same thread.");
  const bool is_innermost = std::next(block) == blocks.end();
  leave(blocks, block);
  TORCH_CHECK(
      is_innermost,
      "A block of inference_mode() or normal_tensors() was left while a block that was entered later on this thread "
      "is still open and stays in effect. Coroutines must not hold such blocks across `await`: decorate the "
      "`async def` with inference_mode instead.");
}

bool isModeBlockOpen() noexcept {
  return !openBlocks().empty();
}

void abandonModeBlocks(BlockOwner owner) {
  OpenBlocks& blocks = openBlocks();
  for (auto block = innermostOf(blocks, owner); block != blocks.end(); block = innermostOf(blocks, owner)) {
    leave(blocks, block);
  }
}

}  // namespace torchext
