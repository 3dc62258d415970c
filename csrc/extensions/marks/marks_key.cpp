#include "marks_key.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/self_tests.h"
#include "../../libraries/support/leases.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "origins.h"
#include "tensor_marks.h"

namespace torchext {

using c10::DispatchKeySet;

namespace {

std::atomic<bool> is_ours{false};

// Indexed by feature.
thread_local std::array<std::uint32_t, static_cast<std::size_t>(MarksFeature::kAmp) + 1> demands{};

std::uint32_t& demandsOf(MarksFeature feature) noexcept {
  return demands.at(static_cast<std::size_t>(feature));
}

bool isAnyDemanded() noexcept {
  return std::any_of(demands.begin(), demands.end(), [](std::uint32_t count) { return count > 0; });
}

bool isIncluded() noexcept {
  return is_ours.load(std::memory_order_relaxed) && c10::impl::tls_is_dispatch_key_included(kMarksKey);
}

// Counts a key that is included without a demand as one of the first feature's. Called before the first demand, which
// would hide that the key was included already.
void countUndemandedKey() noexcept {
  if (isIncluded() && !isAnyDemanded()) {
    demandsOf(MarksFeature::kOrigins) = 1;
  }
}

// One that has not been forgotten already: `dropStaleDemands()`.
void dropOneDemand(MarksFeature feature) noexcept {
  if (demandsOf(feature) > 0) {
    --demandsOf(feature);
  }
}

// Held while blocks demand the key on this thread. Ends with the thread at the latest.
thread_local std::optional<LeaseHold> demand_lease;

void includeIfDemanded() noexcept {
  const bool is_demanded = isAnyDemanded();
  if (is_demanded && !demand_lease) {
    demand_lease.emplace(leaseOfMarks());
  } else if (!is_demanded) {
    demand_lease.reset();
  }
  if (is_demanded != isIncluded()) {
    c10::impl::tls_set_dispatch_key_included(kMarksKey, is_demanded);
  }
}

c10::DispatchKey takenMarksKey() {
  takeMarksKey();
  return kMarksKey;
}

}  // namespace

void takeMarksKey() {
  static LazyKey key{kMarksKey, "AmpTensors, self-cleaning regions and the origins of inference tensors need"};
  key.take([] {
    requireSelfTest("backend_meta", "Marks of tensors need");
    registerFallback(kMarksKey, torch::CppFunction::makeFromBoxedFunction<&marksFallback>());
    hooks().guards.tracesOrigins = [] { return isMarksKeyDemanded(MarksFeature::kOrigins); };
    hooks().guards.traceOrigins = [](bool traces) { setMarksKeyDemanded(MarksFeature::kOrigins, traces); };
    is_ours = true;
  });
}

bool isMarksKeyDemanded(MarksFeature feature) noexcept {
  return isIncluded() && (demandsOf(feature) > 0 || (feature == MarksFeature::kOrigins && !isAnyDemanded()));
}

void demandMarksKey(MarksFeature feature) {
  takeMarksKey();
  countUndemandedKey();
  ++demandsOf(feature);
  includeIfDemanded();
}

void releaseMarksKey(MarksFeature feature) noexcept {
  dropOneDemand(feature);
  includeIfDemanded();
}

void dropStaleDemands() noexcept {
  if (!isIncluded()) {
    demands.fill(0);
    includeIfDemanded();
  }
}

void setMarksKeyDemanded(MarksFeature feature, bool is_demanded) noexcept {
  if (is_ours.load(std::memory_order_relaxed)) {
    demandsOf(feature) = is_demanded ? 1 : 0;
    includeIfDemanded();
  }
}

MarksDemand::MarksDemand(MarksFeature feature) : feature_{feature}, include_{takenMarksKey()} {
  ++demandsOf(feature_);
}

MarksDemand::~MarksDemand() {
  dropOneDemand(feature_);
  if (!isAnyDemanded()) {
    demand_lease.reset();  // of a demand that began and ended in the meantime
  }
}

namespace {

MarksHandler handle_amp = nullptr;

}  // namespace

MarkedCall::MarkedCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
    : op_{op},
      keys_{keys},
      stack_{stack},
      concerns_origins_{isMarksKeyDemanded(MarksFeature::kOrigins)},
      concerns_amp_{isMarksKeyDemanded(MarksFeature::kAmp)} {
  forEachTensor(argumentsOf(op, stack), [this](const Tensor& tensor) {
    if (const TensorMarks* marks = marksOf(*tensor.unsafeGetTensorImpl())) {
      concerns_origins_ = concerns_origins_ || !marks->origin.empty();
      concerns_amp_ = concerns_amp_ || marks->amp != AmpMark::kNone;
    }
  });
}

void MarkedCall::passOn() {
  passOn(keys_);
}

void MarkedCall::passOn(DispatchKeySet keys) {
  keys_ = keys;
  if (std::exchange(concerns_origins_, false)) {
    handleOrigins(*this);
  } else if (std::exchange(concerns_amp_, false)) {
    handle_amp(*this);
  } else {
    const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
    op_.redispatchBoxed(keys_ & DispatchKeySet{DispatchKeySet::FULL_AFTER, kMarksKey}, &stack_);
  }
}

void setHandlerOfAmp(MarksHandler handler) noexcept {
  handle_amp = handler;
}

void marksFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  MarkedCall{op, keys, *stack}.passOn();
}

}  // namespace torchext
