#include "marks_handlers.h"

#include <array>

#include "../../libraries/support/stack_utils.h"
#include "tensor_marks.h"

namespace torchext {

using c10::DispatchKeySet;

namespace {

// Indexed by feature. Initialized before the static objects that fill it while the library is loaded.
std::array<MarksHandler, kNumMarksFeatures> handlers{};

MarksFeatures demandedFeatures() noexcept {
  return MarksFeatures{MarksFeature::kOrigins, isMarksKeyDemanded(MarksFeature::kOrigins)} |
         MarksFeatures{MarksFeature::kAmp, isMarksKeyDemanded(MarksFeature::kAmp)};
}

MarksFeatures featuresOf(const OperatorHandle& op, const Stack& stack) {
  MarksFeatures features = demandedFeatures();
  forEachTensor(stack, op.schema().arguments().size(), [&features](const Tensor& tensor) {
    if (const TensorMarks* marks = marksOf(*tensor.unsafeGetTensorImpl())) {
      features = features | marks->features;
    }
  });
  return features;
}

}  // namespace

void MarkedCall::passOn() {
  passOn(keys_);
}

void MarkedCall::passOn(DispatchKeySet keys) {
  keys_ = keys;
  while (next_ < kNumMarksFeatures) {
    const std::size_t feature = next_++;
    if (features_.has(static_cast<MarksFeature>(feature))) {
      handlers.at(feature)(*this);
      return;
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
  op_.redispatchBoxed(keys_ & DispatchKeySet{DispatchKeySet::FULL_AFTER, kMarksKey}, &stack_);
}

void registerMarksHandler(MarksFeature feature, MarksHandler handler) noexcept {
  handlers.at(static_cast<std::size_t>(feature)) = handler;
}

void marksFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  MarkedCall{op, keys, *stack, featuresOf(op, *stack)}.passOn();
}

}  // namespace torchext
