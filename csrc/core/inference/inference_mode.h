#pragma once

// Inference mode for languages without guards: NOTE [Guards and blocks].

#include <cstdint>

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
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

// NOTE [State of inference mode]
//
// Inference mode is a state of the thread: autograd's flags and the two sets of dispatch keys. A tensor that is
// constructed while the flag `inference_mode` is set gets neither the `Autograd*` nor the `ADInplaceOrView` key, and no
// version counter. Calls skip autograd because its keys are excluded. They skip view tracking and version counters
// because `ADInplaceOrView` is not included; normal tensors have that key, so calls on them still count versions. This
// is the state that `c10::InferenceMode` sets, so both can be queried and nested in each other.
//
// ThreadMode saves and restores this state, and whether the thread traces origins of inference tensors. Restoring
// leaves all other keys unchanged: an autocast region that was open at the time of saving may have been left.
struct ThreadMode {
  c10::AutogradState autograd;
  c10::impl::LocalDispatchKeySet keys;
  bool is_tracing;

  static ThreadMode current();

  // Returns the same state with inference mode on or off. As in PyTorch, "off" is training: gradients are on,
  // also if they were off before.
  ThreadMode inference(bool enabled) const;

  // Returns the same state, but new tensors are normal and gradients are off.
  ThreadMode normalTensors() const;

  void makeCurrent() const;
};

}  // namespace torchext
