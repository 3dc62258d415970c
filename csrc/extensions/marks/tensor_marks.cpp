#include "tensor_marks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>

#include <c10/util/intrusive_ptr.h>

#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../core/torch_internals/self_tests.h"
#include "../../libraries/support/leases.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "origins.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::TensorImpl;

namespace {

using TensorMarksPtr = c10::intrusive_ptr<TensorMarks>;
using WeakMarks = c10::weak_intrusive_ptr<TensorMarks>;

std::atomic<std::int64_t> live_marks{0};

// Finds shared marks without keeping them alive. Has at most a few entries per source line.
class MarksTable {
 public:
  TensorMarksPtr find(const std::string& origin, AmpMark amp) {
    const Locked lock{LockRank::kMarks};
    WeakMarks& slot = slotOf(origin, amp);
    TensorMarksPtr marks = slot.lock();
    if (marks == nullptr) {
      marks = c10::make_intrusive<TensorMarks>(origin, amp);
      slot = WeakMarks{marks};
    }
    return marks;
  }

  // Others may have replaced `dead` before it came here.
  void erase(const TensorMarks& dead) {
    const Locked lock{LockRank::kMarks};
    WeakMarks& slot = slotOf(dead.origin, dead.amp);
    if (slot._unsafe_get_target() == &dead) {
      slot.reset();
    }
    if (slot._unsafe_get_target() == nullptr && !dead.origin.empty()) {
      with_origin_.erase({dead.origin, dead.amp});
    }
  }

 private:
  WeakMarks& slotOf(const std::string& origin, AmpMark amp) {
    return origin.empty() ? without_origin_.at(static_cast<std::size_t>(amp)) : withOrigin(origin, amp);
  }
  WeakMarks& withOrigin(const std::string& origin, AmpMark amp) {
    return with_origin_.try_emplace({origin, amp}, WeakMarks{TensorMarksPtr{}}).first->second;
  }

  // Indexed by AmpMark. Where marking must be fast, most tensors have no origin.
  std::array<WeakMarks, 3> without_origin_{WeakMarks{TensorMarksPtr{}}, WeakMarks{TensorMarksPtr{}},
                                           WeakMarks{TensorMarksPtr{}}};
  std::map<std::pair<std::string, AmpMark>, WeakMarks> with_origin_;
};

// Leaked, because tensors may live until the process ends.
MarksTable& marksTable() {
  static auto* table = new MarksTable;
  return *table;
}

// Writes only changes: arguments that are returned as results may be in use on other threads.
void setMarks(TensorImpl& impl, const std::string& origin, AmpMark amp) {
  const bool is_marked = marksOf(impl) != nullptr;
  const bool is_right = originMarkOf(impl) == origin && ampMarkOf(impl) == amp;
  if (!canBeMarked(impl) || (is_right && impl.key_set().has(kMarksKey) == is_marked)) {
    return;
  }
  TensorMarksPtr marks;
  if (!origin.empty() || amp != AmpMark::kNone) {
    takeMarksKey();
    marks = marksTable().find(origin, amp);
  }
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = marks == nullptr ? keys.remove(kMarksKey) : keys.add(kMarksKey);
  if (marks != nullptr || impl.get_backend_meta() != nullptr) {
    impl.set_backend_meta(std::move(marks));
  }
}

}  // namespace

bool testBackendMeta(bool is_broken) {
  const auto make = [] {
    return c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet{c10::DispatchKey::CPU},
                                                caffe2::TypeMeta::Make<std::uint8_t>(), c10::Device{c10::kCPU});
  };
  const auto impl = make();
  const auto meta = c10::make_intrusive<c10::BackendMeta>();
  impl->set_backend_meta(meta);
  const auto copy = is_broken ? make() : impl->shallow_copy_and_detach(/*version_counter=*/0, true);
  const auto other = make();
  other->shallow_copy_from(copy);
  return impl->get_backend_meta() == meta.get() && copy->get_backend_meta() == meta.get() &&
         other->get_backend_meta() == meta.get();
}

TensorMarks::TensorMarks(std::string source_line, AmpMark amp_mark) : origin{std::move(source_line)}, amp{amp_mark} {
  live_marks.fetch_add(1, std::memory_order_relaxed);
}

TensorMarks::~TensorMarks() {
  live_marks.fetch_sub(1, std::memory_order_acq_rel);
}

void TensorMarks::release_resources() {
  marksTable().erase(*this);
}

std::int64_t liveMarks() noexcept {
  return live_marks.load(std::memory_order_acquire);
}

const TensorMarks* marksOf(const TensorImpl& impl) {
  return dynamic_cast<const TensorMarks*>(const_cast<TensorImpl&>(impl).get_backend_meta());
}

bool canBeMarked(const TensorImpl& impl) {
  return const_cast<TensorImpl&>(impl).get_backend_meta() == nullptr || marksOf(impl) != nullptr;
}

void setOriginMark(TensorImpl& impl, const std::string& origin) {
  setMarks(impl, origin, ampMarkOf(impl));
}

void setAmpMark(TensorImpl& impl, AmpMark amp) {
  setMarks(impl, originMarkOf(impl), amp);
}

Tensor withoutMarks(const Tensor& tensor) {
  const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  Tensor plain{impl.shallow_copy_and_detach(/*version_counter=*/0, /*allow_tensor_metadata_change=*/true)};
  setMarks(*plain.unsafeGetTensorImpl(), {}, AmpMark::kNone);
  return plain;
}

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

MarksHandler handle_amp = nullptr;

void marksFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  MarkedCall{op, keys, *stack}.passOn();
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
  if (isIncluded() && !isAnyDemanded()) {
    demandsOf(MarksFeature::kOrigins) = 1;  // the demand below would hide that the key was included already
  }
  ++demandsOf(feature);
  includeIfDemanded();
}

void releaseMarksKey(MarksFeature feature) noexcept {
  if (demandsOf(feature) > 0) {  // not dropped already: `dropStaleDemands()`
    --demandsOf(feature);
  }
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

}  // namespace torchext
