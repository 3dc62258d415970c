#include "amp_handler.h"

#include <algorithm>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/stack_utils.h"
#include "../marks/marks_key.h"
#include "amp_tensor.h"
#include "backward.h"
#include "policies.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

bool isOfPyTorch(const OperatorHandle& op) {
  return namespaceOf(op.operator_name()) == "aten";
}

// The thread state for a call with wrapped tensors: autocast is on for their devices, and casts are not cached, because
// no region would clear the cache at its end.
class AmpAutocastGuard {
 public:
  explicit AmpAutocastGuard(DispatchKeySet autocast_keys) : keys_{stateWith(autocast_keys)} {
    autocast::set_autocast_cache_enabled(false);
  }
  C10_DISABLE_COPY_AND_ASSIGN(AmpAutocastGuard);
  ~AmpAutocastGuard() {
    autocast::set_autocast_cache_enabled(was_caching_);
  }

 private:
  static c10::impl::LocalDispatchKeySet stateWith(DispatchKeySet autocast_keys) {
    auto state = c10::impl::tls_local_dispatch_key_set();
    state.excluded_ = (state.excluded_ - autocast_keys).add(kMarksKey);
    return state;
  }

  c10::impl::ForceDispatchKeyGuard keys_;
  bool was_caching_ = autocast::is_autocast_cache_enabled();
};

// Handles one call. The header lists the steps.
class AmpCall {
 public:
  AmpCall(const OperatorHandle& op, Stack& stack)
      : op_{op}, stack_{stack}, num_arguments_{op.schema().arguments().size()}, arguments_{op, stack} {}

  void run(MarkedCall& call);

  // The action of run(), and the autocast keys that it uses.
  AmpOutcome decide() const;
  DispatchKeySet autocastKeys() const {
    return arguments_.autocast_keys;
  }

 private:
  struct Cleaned {
    Tensor original;
    Tensor in_float32;
  };

  bool isNothingToClean() const;
  bool isViewOnly() const;
  bool isAboutTensorItself() const;
  bool isWriteAlone() const;
  bool isWritingThroughTwo() const;

  void autocastAmpTensors(MarkedCall& call) const;
  void clean(MarkedCall& call);
  IValue cleanArgument(const IValue& value, bool is_written);
  void writeBack();

  const OperatorHandle& op_;
  Stack& stack_;
  const std::size_t num_arguments_;
  const AmpArguments arguments_;
  // The written arguments, cast for the call.
  std::vector<Cleaned> cleaned_;
};

void AmpCall::run(MarkedCall& call) {
  switch (decide()) {
    case AmpOutcome::kPassesOn:
      call.passOn();
      markResultsOfOthers(op_, stack_, arguments_);
      return;
    case AmpOutcome::kPassesOnInBackward:
      call.passOn();
      break;
    case AmpOutcome::kAutocasts:
      autocastAmpTensors(call);
      break;
    case AmpOutcome::kCleans:
      clean(call);
  }
  markResults(op_, stack_, arguments_);
}

AmpOutcome AmpCall::decide() const {
  if (isInBackward() && !(arguments_.is_mixture && isInUsersBackward())) {
    return AmpOutcome::kPassesOnInBackward;
  }
  if (arguments_.has_wrapped && !isRegionDeciding()) {
    return AmpOutcome::kAutocasts;
  }
  return arguments_.unclean != at::ScalarType::Undefined && !isNothingToClean() ? AmpOutcome::kCleans
                                                                                : AmpOutcome::kPassesOn;
}

// Results of `zeros_like` and similar factories are used like the argument, as optimizer states are used with the
// gradients of a parameter, in its dtype. So factories have nothing to clean.
bool AmpCall::isNothingToClean() const {
  return isViewOnly() || isFactory(op_, torch::jit::last(stack_, num_arguments_)) || isAboutTensorItself() ||
         isWriteAlone() || isWritingThroughTwo();
}

// A view shares the memory of its base, also for writes. Some of these operators copy if they have to (`reshape`,
// `contiguous`, `to`).
bool AmpCall::isViewOnly() const {
  const auto& returns = op_.schema().returns();
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), is_view) &&
         op_.operator_name().name != "aten::view_as_complex";  // the lower precisions have no complex numbers
}

// Changes of metadata, and autograd operators (`_backward`, `retain_grad`, `set_data`), which return nothing.
bool AmpCall::isAboutTensorItself() const {
  return op_.hasTag(at::Tag::inplace_view) ||
         (op_.schema().returns().empty() && arguments_.written.size() <= 1 &&
          op_.schema().arguments()[0].type()->kind() == c10::TypeKind::TensorType && isOfPyTorch(op_));
}

// The dtype of the written tensor has to match no other argument.
bool AmpCall::isWriteAlone() const {
  return !arguments_.written.empty() && (arguments_.all.size() == 1 || op_.operator_name().name == "aten::copy_");
}

// Two views of the same elements would have separate casts, and each would receive only a part of the writes.
bool AmpCall::isWritingThroughTwo() const {
  const auto& written = arguments_.written;
  for (const Tensor& one : written) {
    const bool has_other = std::any_of(written.begin(), written.end(), [&one](const Tensor& other) {
      return !other.is_same(one) && other.has_storage() && one.has_storage() && other.is_alias_of(one) &&
             at::get_overlap_status(one, other) != at::MemOverlapStatus::No;
    });
    if (has_other) {
      return true;
    }
  }
  return false;
}

void AmpCall::autocastAmpTensors(MarkedCall& call) const {
  const AmpAutocastGuard guard{arguments_.autocast_keys};
  DispatchKeySet keys = call.keys();
  for (const DispatchKey key : arguments_.autocast_keys) {
    // Most operators fall through this key, which redispatching does not support.
    if (op_.hasKernelForDispatchKey(key)) {
      keys = keys.add(key);
    }
  }
  call.passOn(keys);
}

void AmpCall::clean(MarkedCall& call) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
  for (const auto i : c10::irange(num_arguments_)) {
    IValue& argument = torch::jit::peek(stack_, i, num_arguments_);
    argument = cleanArgument(argument, isWritten(op_.schema().arguments()[i]));
  }
  call.passOn();
  writeBack();
}

// Also casts other tensors of the lower precision: few operators accept mixed dtypes.
IValue AmpCall::cleanArgument(const IValue& value, bool is_written) {
  return mapTensors(value, [this, is_written](const Tensor& tensor) {
    if (!isUnclean(tensor) && (tensor.scalar_type() != arguments_.unclean || isAutocastingFor(tensor))) {
      return tensor;
    }
    if (!is_written) {
      return tensor.to(at::kFloat);
    }
    // A tensor that occurs twice in a list is written twice.
    const auto found = std::find_if(cleaned_.begin(), cleaned_.end(),
                                    [&tensor](const Cleaned& cleaned) { return cleaned.original.is_same(tensor); });
    return found == cleaned_.end() ? cleaned_.emplace_back(Cleaned{tensor, tensor.to(at::kFloat)}).in_float32
                                   : found->in_float32;
  });
}

// Written arguments keep their dtype and identity.
void AmpCall::writeBack() {
  for (const Cleaned& cleaned : cleaned_) {
    if (cleaned.original.sizes() != cleaned.in_float32.sizes()) {
      cleaned.original.resize_(cleaned.in_float32.sizes());  // resized like an `out=` argument
    }
    cleaned.original.copy_(cleaned.in_float32);
  }
  if (!cleaned_.empty()) {
    mapTensors(stack_, op_.schema().returns().size(), [this](const Tensor& result) {
      const auto found = std::find_if(cleaned_.begin(), cleaned_.end(),
                                      [&result](const Cleaned& cleaned) { return cleaned.in_float32.is_same(result); });
      return found == cleaned_.end() ? result : found->original;
    });
  }
}

void handleAmpCall(MarkedCall& call) {
  if (isProbingKernel()) {
    inspectProbedCall(call.op(), call.stack());
  }
  AmpCall{call.op(), call.stack()}.run(call);
}

}  // namespace

AmpPrediction predictAmp(const OperatorHandle& op, const Stack& arguments) {
  Stack stack = arguments;
  const AmpCall call{op, stack};
  const AmpOutcome outcome = call.decide();
  return {outcome, outcome == AmpOutcome::kAutocasts ? call.autocastKeys() : DispatchKeySet{}};
}

void registerAmpHandler() {
  setHandlerOfAmp(&handleAmpCall);
  hooks().guards.beginCleaning = [] { demandMarksKey(MarksFeature::kAmp); };  // the handler receives all operators
  hooks().guards.endCleaning = [] { releaseMarksKey(MarksFeature::kAmp); };
}

}  // namespace torchext
