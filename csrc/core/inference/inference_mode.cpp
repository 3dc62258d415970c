#include <memory>
#include <string>
#include <vector>

#include <c10/core/DispatchKeySet.h>
#include <torchext/inference_mode.h>

#include "thread_mode.h"

namespace torchext {

using c10::AutogradState;
using c10::DispatchKey;

struct InferenceMode::State {
  ThreadMode mode = ThreadMode::current();
};

InferenceMode::InferenceMode(bool enabled) : previous_{std::make_unique<State>()} {
  previous_->mode.inference(enabled).makeCurrent();
}

InferenceMode::~InferenceMode() {
  previous_->mode.makeCurrent();
}

bool InferenceMode::is_enabled() {
  return AutogradState::get_tls_state().get_inference_mode();
}

struct NormalTensors::State {
  ThreadMode mode = ThreadMode::current();
};

NormalTensors::NormalTensors() : previous_{std::make_unique<State>()} {
  previous_->mode.normalTensors().makeCurrent();
}

NormalTensors::~NormalTensors() {
  previous_->mode.makeCurrent();
}

std::vector<std::string> check_dispatch_state() {
  const ThreadMode mode = ThreadMode::current();
  const auto& [included, excluded] = mode.keys;
  // Autograd counts as excluded if all of its keys are; the key of a single backend may be excluded separately.
  const bool autograd_excluded = (c10::autograd_dispatch_keyset - excluded).empty();
  const bool autograd_included = included.has_any(c10::autograd_dispatch_keyset);
  const bool tracking_included = included.has(DispatchKey::ADInplaceOrView);
  const bool tracking_excluded = excluded.has(DispatchKey::ADInplaceOrView);
  const bool is_inference = mode.autograd.get_inference_mode();
  std::vector<std::string> illegal;
  const auto report = [&illegal](bool found, const char* sentence) {
    if (found) {
      illegal.emplace_back(sentence);
    }
  };
  report(
      !tracking_included && !autograd_excluded,
      "`ADInplaceOrView` is not included although `Autograd` is not excluded: inference tensors can be changed outside "
      "inference mode.");
  report(tracking_excluded && !autograd_excluded,
         "`ADInplaceOrView` is excluded although `Autograd` is not: views and versions of tensors that autograd saves "
         "are not tracked.");
  report(autograd_included, "An `Autograd` key is included: autograd also runs for inference tensors.");
  report(is_inference && !autograd_excluded,
         "Inference mode is on, but `Autograd` is not excluded: normal tensors record gradients.");
  report(
      is_inference && tracking_included,
      "Inference mode is on, but `ADInplaceOrView` is included: views and versions of inference tensors are tracked.");
  report(is_inference && mode.autograd.get_grad_mode(),
         "Inference mode is on, and so is grad mode: code that only checks grad mode assumes that gradients are "
         "recorded.");
  report(!is_inference && !tracking_included && autograd_excluded,
         "The keys are those of inference mode, but inference mode is off: new tensors are normal, and their versions "
         "are not counted.");
  return illegal;
}

}  // namespace torchext
