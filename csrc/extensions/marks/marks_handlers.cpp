#include "marks_handlers.h"

#include <utility>

#include "../../libraries/support/stack_utils.h"
#include "origins.h"
#include "tensor_marks.h"

namespace torchext {

using c10::DispatchKeySet;

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
