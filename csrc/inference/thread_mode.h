#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

// NOTE [What inference mode is made of]
//
// Inference mode is nothing but a state of the thread: autograd's flags, and the two sets of dispatch keys. A tensor
// that is constructed while the flag `inference_mode` is set gets neither the `Autograd*` nor the `ADInplaceOrView` key
// and no version counter. Calls skip autograd because its keys are excluded, and skip view tracking and version
// counters because `ADInplaceOrView` is not included; but a normal tensor carries that key itself, so calls on it still
// count its versions. All of it is what `c10::InferenceMode` sets, so that either may be asked and either nested in the
// other.
//
// This is that state, to be saved and put back, and whether the thread traces origins of inference tensors. The other
// keys are left as they are then: a region of autocast that was open when the state was saved may have been left.
struct ThreadMode {
  c10::AutogradState autograd;
  c10::impl::LocalDispatchKeySet keys;
  bool is_tracing;

  static ThreadMode current();

  // The same state with inference mode on or off. As in PyTorch, "off" is training: gradients are on, whatever they
  // were before.
  ThreadMode inference(bool enabled) const;

  // The same state, in which new tensors are normal ones, and nobody asks for gradients.
  ThreadMode normalTensors() const;

  void makeCurrent() const;
};

}  // namespace torchext
