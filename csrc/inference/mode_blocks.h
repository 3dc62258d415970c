#pragma once

// Inference mode for languages without guards: NOTE [Guards and blocks].

#include <cstdint>

#include <torchext/macros.h>

#include "../support/open_blocks.h"

namespace torchext {

enum class ModeBlock : std::uint8_t { kInference, kNoInference, kNormalTensors };

// The owner may enter any number of blocks, on any thread. If `is_traced`, or if all are, the block is one of
// NOTE [Origins of inference tensors].
TORCHEXT_API void enterModeBlock(BlockOwner owner, ModeBlock kind, bool is_traced = false);

// Leaves the owner's innermost block on this thread. Raises when there is none, and changes nothing. Raises, too, when
// another's block, entered later, is still open: that one stays in force until it is left, and then the thread is as it
// was before both.
TORCHEXT_API void leaveModeBlock(BlockOwner owner);

// Is a block open on this thread, of any kind?
bool isModeBlockOpen() noexcept;

// Leaves all blocks of the owner that are open on this thread, for an owner that dies in them.
TORCHEXT_API void abandonModeBlocks(BlockOwner owner);

}  // namespace torchext
