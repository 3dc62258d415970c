#include "thread_mode.h"

#include <c10/core/DispatchKeySet.h>

#include "../hooks/hooks.h"

namespace torchext {

using c10::AutogradState;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::LocalDispatchKeySet;
using c10::impl::PODLocalDispatchKeySet;

namespace {

const DispatchKeySet kTracking{DispatchKey::ADInplaceOrView};

LocalDispatchKeySet keySets(DispatchKeySet included, DispatchKeySet excluded) {
  PODLocalDispatchKeySet sets{};
  sets.set_included(included);
  sets.set_excluded(excluded);
  return LocalDispatchKeySet{sets};
}

// `ADInplaceOrView` is never excluded: the key of normal tensors must stay enabled.
LocalDispatchKeySet inferenceKeys(const LocalDispatchKeySet& keys, bool enabled) {
  return enabled ? keySets(keys.included_.remove(DispatchKey::ADInplaceOrView),
                           keys.excluded_ | c10::autograd_dispatch_keyset)
                 : keySets(keys.included_.add(DispatchKey::ADInplaceOrView),
                           keys.excluded_ - c10::autograd_dispatch_keyset);
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
  const LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  c10::impl::_force_tls_local_dispatch_key_set(
      keySets((now.included_ - kTracking) | (keys.included_ & kTracking),
              (now.excluded_ - c10::autograd_dispatch_keyset) | (keys.excluded_ & c10::autograd_dispatch_keyset)));
}

}  // namespace torchext
