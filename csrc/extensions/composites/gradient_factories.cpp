#include "gradient_factories.h"

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>

#include "../../libraries/support/locks.h"
#include "../support/autograd.h"
#include "../values/factories_of_call.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// The formula that runs on this thread, or null.
thread_local const RunningFormula* running = nullptr;

thread_local bool is_in_tangent_formula = false;

constexpr std::array kKeysOfFactories{DispatchKey::Fake, DispatchKey::DeferredInit};

}  // namespace

struct RunningFormula final : at::ObserverContext {
  explicit RunningFormula(c10::ArrayRef<c10::IValue> gradients) : factories{gradients} {
    running = this;
  }
  C10_DISABLE_COPY_AND_ASSIGN(RunningFormula);
  ~RunningFormula() override {
    running = outer;
  }

  const RunningFormula* outer = running;
  const c10::impl::LocalDispatchKeySet keys_before = c10::impl::tls_local_dispatch_key_set();
  FactoriesOfCall factories;
};

namespace {

std::atomic<bool> are_fakes_wanted{false};

void observe(bool are_wanted_now);

// The context lives until the node has run.
std::unique_ptr<at::ObserverContext> beforeNode(const at::RecordFunction& node) {
  if (!are_fakes_wanted) {
    observe(false);
    return nullptr;
  }
  if (!isRunningPyTorchsNode()) {
    return nullptr;
  }
  const auto inputs = node.inputs();
  const std::vector<c10::IValue> gradients(inputs.begin(), inputs.end());
  return std::make_unique<RunningFormula>(gradients);
}

// Includes exactly those of the two keys that are in `keys`.
void include(c10::DispatchKeySet keys) {
  for (const DispatchKey key : kKeysOfFactories) {
    c10::impl::tls_set_dispatch_key_included(key, keys.has(key));
  }
}

at::CallbackHandle addObserver() {
  return at::addGlobalCallback(
      at::RecordFunctionCallback{&beforeNode}.needsInputs(true).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

// Enables or disables the observer. Afterwards each thread rereads the list of observers in its next operator, under a
// PyTorch mutex that may be locked in a forked child. So call this only on a change.
void observe(bool are_wanted_now) {
  static bool is_observing = false;
  const Locked lock{LockRank::kObserver};
  if (is_observing == are_wanted_now || are_fakes_wanted != are_wanted_now) {
    return;  // another thread has done this, or has changed `are_fakes_wanted` since
  }
  is_observing = are_wanted_now;
  static const at::CallbackHandle handle = addObserver();
  if (are_wanted_now) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

// After a change of the observers each thread rereads their list in its next operator, under a mutex of PyTorch that
// another thread may hold during a fork. So the thread that forks reads the list first.
void readObservers() {
  static_cast<void>(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION));
}

[[maybe_unused]] const bool reads_observers_before_forks = pthread_atfork(&readObservers, nullptr, nullptr) == 0;

}  // namespace

bool isInGradientFormula() {
  return running != nullptr && isRunningPyTorchsNode();
}

TangentFormula::TangentFormula(bool has_tangent) : previous_{is_in_tangent_formula} {
  is_in_tangent_formula = has_tangent;
}

TangentFormula::~TangentFormula() {
  is_in_tangent_formula = previous_;
}

bool isInTangentFormula() {
  return is_in_tangent_formula;
}

OutsideOfFormula::OutsideOfFormula()
    : formula_{running},
      was_in_tangent_formula_{is_in_tangent_formula},
      included_{c10::impl::tls_local_dispatch_key_set().included_} {
  if (formula_ != nullptr) {
    include(formula_->keys_before.included_);
  }
  running = nullptr;
  is_in_tangent_formula = false;
}

OutsideOfFormula::~OutsideOfFormula() {
  if (formula_ != nullptr) {
    include(included_);
  }
  running = formula_;
  is_in_tangent_formula = was_in_tangent_formula_;
}

void makeGradientsFake(bool are_wanted_now) {
  are_fakes_wanted = are_wanted_now;
  if (are_wanted_now) {
    observe(true);
  }
}

}  // namespace torchext
