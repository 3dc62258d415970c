#include "thread_mode.h"

#include <c10/core/DispatchKeySet.h>

#include "../hooks/hooks.h"

namespace torchext {

using c10::AutogradState;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::LocalDispatchKeySet;

namespace {

const DispatchKeySet kTracking{DispatchKey::ADInplaceOrView};

// `ADInplaceOrView` is never excluded: the key of normal tensors must stay enabled.
LocalDispatchKeySet inferenceKeys(LocalDispatchKeySet keys, bool enabled) {
  keys.included_ = enabled ? keys.included_ - kTracking : keys.included_ | kTracking;
  keys.excluded_ =
      enabled ? keys.excluded_ | c10::autograd_dispatch_keyset : keys.excluded_ - c10::autograd_dispatch_keyset;
  return keys;
}

}  // namespace

ThreadMode ThreadMode::current() {
  return {AutogradState::get_tls_state(), c10::impl::tls_local_dispatch_key_set(), hooks().guards.tracesOrigins()};
}

// Makes a new AutogradState instead of a changed copy: inside c10::InferenceMode, the flags beyond these four have
// their defaults.
ThreadMode ThreadMode::inference(bool enabled) const {
  return {AutogradState{/*grad_mode=*/!enabled, /*inference_mode=*/enabled, /*fw_grad_mode=*/!enabled,
                        /*multithreading_enabled=*/!enabled},
          inferenceKeys(keys, enabled), is_tracing};
}

ThreadMode ThreadMode::normalTensors() const {
  ThreadMode mode = autograd.get_inference_mode() ? inference(false) : *this;
  mode.autograd.set_grad_mode(false);
  return mode;
}

void ThreadMode::makeCurrent() const {
  AutogradState::set_tls_state(autograd);
  hooks().guards.traceOrigins(is_tracing);
  LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  now.included_ = (now.included_ - kTracking) | (keys.included_ & kTracking);
  now.excluded_ = (now.excluded_ - c10::autograd_dispatch_keyset) | (keys.excluded_ & c10::autograd_dispatch_keyset);
  c10::impl::_force_tls_local_dispatch_key_set(now);
}

}  // namespace torchext
