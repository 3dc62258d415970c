// The guards of torchext/inference_mode.h, as C++ programs use them.

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/inference_mode.h>

#include "tests.h"

using c10::AutogradState;
using c10::DispatchKey;
using torchext::check_dispatch_state;
using torchext::InferenceMode;
using torchext::NormalTensors;

namespace {

// The state that a guard may change.
struct State {
  State()
      : included{c10::impl::tls_local_dispatch_key_set().included_.raw_repr()},
        excluded{c10::impl::tls_local_dispatch_key_set().excluded_.raw_repr()},
        grad{AutogradState::get_tls_state().get_grad_mode()},
        inference{AutogradState::get_tls_state().get_inference_mode()},
        forward_grad{AutogradState::get_tls_state().get_fw_grad_mode()},
        multithreading{AutogradState::get_tls_state().get_multithreading_enabled()},
        view_replay{AutogradState::get_tls_state().get_view_replay_enabled()} {}

  bool operator==(const State& other) const {
    return included == other.included && excluded == other.excluded && grad == other.grad &&
           inference == other.inference && forward_grad == other.forward_grad &&
           multithreading == other.multithreading && view_replay == other.view_replay;
  }

  std::uint64_t included;
  std::uint64_t excluded;
  bool grad;
  bool inference;
  bool forward_grad;
  bool multithreading;
  bool view_replay;
};

template <typename Guard>
State stateInside(bool enabled) {
  const Guard guard{enabled};
  return State{};
}

void matchesTheStateOfPyTorch() {
  for (const bool grad : {true, false}) {
    const c10::AutoGradMode grad_mode{grad};
    for (const bool enabled : {true, false}) {
      EXPECT(stateInside<InferenceMode>(enabled) == stateInside<c10::InferenceMode>(enabled));
      const InferenceMode outer{enabled};
      EXPECT(stateInside<InferenceMode>(!enabled) == stateInside<c10::InferenceMode>(!enabled));
      EXPECT(stateInside<InferenceMode>(enabled) == stateInside<c10::InferenceMode>(enabled));
    }
  }
}

void nestsAndRestores() {
  const State before;
  {
    const InferenceMode on;
    const State inside;
    EXPECT(c10::InferenceMode::is_enabled() && InferenceMode::is_enabled());
    EXPECT(!c10::GradMode::is_enabled());
    {
      const c10::InferenceMode off{false};
      EXPECT(!InferenceMode::is_enabled());
      {
        const InferenceMode on_again{true};
        EXPECT(State{} == inside);
      }
      EXPECT(!c10::InferenceMode::is_enabled());
    }
    EXPECT(State{} == inside);
  }
  EXPECT(State{} == before);
}

void restoresWhenAnExceptionPasses() {
  const State before;
  try {
    const InferenceMode outer;
    const NormalTensors inner;
    throw std::runtime_error("passes");
  } catch (const std::runtime_error&) {
    EXPECT(State{} == before);
  }
  try {
    const InferenceMode guard;
    at::ones({2}).add_(at::ones({3}));
  } catch (const c10::Error&) {
    EXPECT(State{} == before);
  }
  EXPECT(State{} == before);
}

void affectsOneThreadOnly() {
  const InferenceMode guard;
  bool inside_is_enabled = true;
  bool trained = false;
  std::thread thread([&] {
    inside_is_enabled = InferenceMode::is_enabled();
    at::Tensor weight = at::ones({2}).requires_grad_();
    const at::Tensor loss = weight.mul(3).sum();
    loss.backward();
    trained = weight.grad().eq(3).all().item<bool>();
  });
  thread.join();
  EXPECT(!inside_is_enabled);
  EXPECT(trained);
  EXPECT(InferenceMode::is_enabled());
}

void followsTheRules() {
  at::Tensor normal = at::ones({2});
  at::Tensor inference;
  const auto version = normal._version();
  {
    const InferenceMode guard;
    inference = at::ones({2});
    EXPECT(inference.is_inference());
    EXPECT(normal.mul(2).is_inference());
    EXPECT(!normal.view({1, 2}).is_inference());
    EXPECT(inference.view({1, 2}).is_inference());
    EXPECT(!inference.view({1, 2}).is_view());
    inference.add_(1);
    normal.add_(1);
  }
  EXPECT(normal._version() == version + 1);
  try {
    inference.add_(1);
  } catch (const c10::Error& error) {
    EXPECT(std::string{error.what()}.find("Inplace update to inference tensor") != std::string::npos);
    return;
  }
  throw std::logic_error("an inference tensor was changed outside inference mode");
}

void makesNormalTensors() {
  const InferenceMode guard;
  {
    const NormalTensors normal;
    EXPECT(!at::ones({2}).is_inference());
    EXPECT(!c10::GradMode::is_enabled());
  }
  const at::Tensor tensor = at::ones({2});
  const at::Tensor view = tensor.view({1, 2});
  torchext::makeNormal({tensor, view});
  EXPECT(!tensor.is_inference() && !view.is_inference());
  tensor.add_(1);
  EXPECT(view._version() == 1);
}

void reportsIllegalStates() {
  EXPECT(check_dispatch_state().empty());
  const c10::impl::LocalDispatchKeySet training = c10::impl::tls_local_dispatch_key_set();
  {
    const c10::impl::ForceDispatchKeyGuard guard{training.included_.remove(DispatchKey::ADInplaceOrView),
                                                 training.excluded_};
    EXPECT(check_dispatch_state().size() == 1);
    EXPECT(check_dispatch_state().front().find("`ADInplaceOrView` is not included") == 0);
  }
  const InferenceMode guard;
  EXPECT(check_dispatch_state().empty());
  const c10::AutoGradMode grad_mode{true};
  EXPECT(check_dispatch_state().size() == 1);
}

constexpr Test kTests[] = {
    {"matches_the_state_of_pytorch", &matchesTheStateOfPyTorch},
    {"nests_and_restores", &nestsAndRestores},
    {"restores_when_an_exception_passes", &restoresWhenAnExceptionPasses},
    {"affects_one_thread_only", &affectsOneThreadOnly},
    {"follows_the_rules", &followsTheRules},
    {"makes_normal_tensors", &makesNormalTensors},
    {"reports_illegal_states", &reportsIllegalStates},
};

}  // namespace

EXPORT_TESTS(kTests)
