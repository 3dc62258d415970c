#pragma once

// Inference mode for languages without guards: NOTE [Guards and blocks].

#include <cstdint>

#include <torchext/macros.h>

#include "../../libraries/support/open_blocks.h"

namespace torchext {

enum class ModeBlock : std::uint8_t { kInference, kNoInference, kNormalTensors };

// An owner may enter any number of blocks, on any thread. Does not trace origins, which an extension does.
TORCHEXT_API void enterModeBlock(BlockOwner owner, ModeBlock kind);

// Leaves the owner's innermost block on this thread. Raises without changes if it has no open block. Also raises if a
// block of another owner, entered later, is still open: that one stays in effect until it is left, and then restores
// the state before both.
TORCHEXT_API void leaveModeBlock(BlockOwner owner);

// Returns true if a block of any kind is open on this thread.
bool isModeBlockOpen() noexcept;

// Leaves all blocks of the owner on this thread, for an owner that is destroyed inside of them.
TORCHEXT_API void abandonModeBlocks(BlockOwner owner);

}  // namespace torchext
