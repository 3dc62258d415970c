#include "thread_mode.h"

#include <c10/core/DispatchKeySet.h>

#include "../amp/region.h"
#include "../marks/tensor_marks.h"
#include "origins.h"

namespace torchext {

using c10::AutogradState;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::LocalDispatchKeySet;
using c10::impl::PODLocalDispatchKeySet;

namespace {

// What inference mode and the tracing of origins include.
const DispatchKeySet kIncluded({DispatchKey::ADInplaceOrView, kMarksKey});

LocalDispatchKeySet keySets(DispatchKeySet included, DispatchKeySet excluded) {
  PODLocalDispatchKeySet sets{};
  sets.set_included(included);
  sets.set_excluded(excluded);
  return LocalDispatchKeySet{sets};
}

// `ADInplaceOrView` is never excluded for this: a normal tensor's own key must still be met.
LocalDispatchKeySet inferenceKeys(const LocalDispatchKeySet& keys, bool enabled) {
  return enabled ? keySets(keys.included_.remove(DispatchKey::ADInplaceOrView),
                           keys.excluded_ | c10::autograd_dispatch_keyset)
                 : keySets(keys.included_.add(DispatchKey::ADInplaceOrView),
                           keys.excluded_ - c10::autograd_dispatch_keyset);
}

}  // namespace

ThreadMode ThreadMode::current() {
  const LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const DispatchKeySet included = isTracingOrigins() ? keys.included_ : keys.included_.remove(kMarksKey);
  return {AutogradState::get_tls_state(), keySets(included, keys.excluded_)};
}

// A new AutogradState, not a changed copy: the flags beyond these four are at their defaults inside c10::InferenceMode.
ThreadMode ThreadMode::inference(bool enabled) const {
  return {AutogradState{/*grad_mode=*/!enabled, /*inference_mode=*/enabled, /*fw_grad_mode=*/!enabled,
                        /*multithreading_enabled=*/!enabled},
          inferenceKeys(keys, enabled)};
}

ThreadMode ThreadMode::normalTensors() const {
  ThreadMode mode = autograd.get_inference_mode() ? inference(false) : *this;
  mode.autograd.set_grad_mode(false);
  return mode;
}

void ThreadMode::makeCurrent() const {
  AutogradState::set_tls_state(autograd);
  const LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  const DispatchKeySet marks = isInSelfCleaningRegion() ? DispatchKeySet{kMarksKey} : DispatchKeySet{};
  c10::impl::_force_tls_local_dispatch_key_set(
      keySets((now.included_ - kIncluded) | (keys.included_ & kIncluded) | marks,
              (now.excluded_ - c10::autograd_dispatch_keyset) | (keys.excluded_ & c10::autograd_dispatch_keyset)));
}

}  // namespace torchext
