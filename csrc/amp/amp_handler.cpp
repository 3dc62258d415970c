#include "amp_handler.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>

#include "../fake/op_traits.h"
#include "../stack_utils.h"
#include "amp_tensor.h"
#include "backward.h"
#include "policy_probe.h"
#include "region.h"

namespace torchext {

namespace autocast = at::autocast;
using at::Tensor;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

const DispatchKeySet kBelowAmp{DispatchKeySet::FULL_AFTER, kMarksKey};

bool isAutocastingFor(const Tensor& tensor) {
  const DeviceType device_type = tensor.device().type();
  return autocast::is_autocast_available(device_type) && autocast::is_autocast_enabled(device_type);
}

// Autocast never touches double, and what is in float32 is clean.
bool isLower(const Tensor& tensor) {
  return tensor.is_floating_point() && tensor.scalar_type() != at::kDouble && tensor.scalar_type() != at::kFloat;
}

bool isOfPyTorch(const OperatorHandle& op) {
  return op.operator_name().name.rfind("aten::", 0) == 0;
}

// The state of the thread in which the call of a wrapped tensor goes on: with autocast for its devices, and without
// remembering casts, because there is no region at whose end to forget them.
class IdentityAutocast {
 public:
  explicit IdentityAutocast(DispatchKeySet autocast_keys) : keys_{stateWith(autocast_keys)} {
    autocast::set_autocast_cache_enabled(false);
  }
  IdentityAutocast(const IdentityAutocast&) = delete;
  IdentityAutocast& operator=(const IdentityAutocast&) = delete;
  IdentityAutocast(IdentityAutocast&&) = delete;
  IdentityAutocast& operator=(IdentityAutocast&&) = delete;
  ~IdentityAutocast() {
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

// Handles one call. csrc/README.md tells the steps.
class AmpCall {
 public:
  AmpCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
      : op_{op}, keys_{keys}, stack_{stack}, num_arguments_{op.schema().arguments().size()} {}

  void run();

  // What run() would do.
  AmpOutcome decide();

  // The keys of autocast on the devices of wrapped arguments; empty when there is none. To be asked after decide().
  DispatchKeySet autocastKeys() const {
    return wrapped_;
  }

 private:
  struct Cleaned {
    Tensor original;
    Tensor in_float32;
  };

  // What is known of the call.
  void lookAtArguments();
  void lookAt(const Tensor& tensor);
  void keepArguments();
  bool isUnclean(const Tensor& tensor) const;
  bool isMixture() const;
  bool isNothingToClean() const;
  bool isViewOnly() const;
  bool isAboutTensorItself() const;
  bool isWriteAlone() const;
  bool isArgument(const Tensor& result) const;
  bool isArgumentsStorage(const Tensor& result) const;
  bool isViewOfToBeCleaned(const Tensor& result) const;

  // What can be done with it.
  void passOn();
  void autocastByIdentity();
  void clean();
  IValue cleanArgument(const IValue& value, bool is_written);
  void writeBack();

  // What its results are.
  void markAlike();
  void markMadeInside();
  void markAsArguments();
  template <typename Visitor>
  void forEachResult(Visitor visit) const;

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const std::size_t num_arguments_;
  // The keys of autocast on the devices of wrapped arguments; empty when there is none.
  DispatchKeySet wrapped_;
  bool has_wrapped_ = false;
  // The memory of arguments that are to be cleaned.
  c10::SmallVector<const c10::StorageImpl*, 2> to_be_cleaned_;
  // Of an argument that is to be cleaned, and Undefined when there is none.
  at::ScalarType unclean_ = at::ScalarType::Undefined;
  // What the call writes, and all its arguments, the latter only where results are compared with them.
  std::vector<Tensor> written_;
  c10::SmallVector<Tensor, 4> arguments_;
  std::vector<Cleaned> cleaned_;
};

void AmpCall::run() {
  const AmpOutcome outcome = decide();
  keepArguments();
  switch (outcome) {
    case AmpOutcome::kPassesOnInBackward:
      passOn();
      markAlike();
      break;
    case AmpOutcome::kAutocasts:
      autocastByIdentity();
      markAlike();
      break;
    case AmpOutcome::kCleans:
      clean();
      markAlike();
      break;
    case AmpOutcome::kPassesOn:
      passOn();
      markAlike();
      markMadeInside();
      markAsArguments();
  }
}

AmpOutcome AmpCall::decide() {
  lookAtArguments();
  if (isInBackward() && !(isInUsersBackward() && isMixture())) {
    return AmpOutcome::kPassesOnInBackward;
  }
  if (has_wrapped_ && !isRegionDeciding()) {
    return AmpOutcome::kAutocasts;
  }
  return unclean_ != at::ScalarType::Undefined && !isNothingToClean() ? AmpOutcome::kCleans : AmpOutcome::kPassesOn;
}

void AmpCall::lookAtArguments() {
  const auto& arguments = op_.schema().arguments();
  for (const auto i : c10::irange(num_arguments_)) {
    const bool is_written = isWritten(arguments[i]);
    forEachTensor(torch::jit::peek(stack_, i, num_arguments_), [&](const Tensor& tensor) {
      lookAt(tensor);
      if (is_written) {
        written_.push_back(tensor);
      }
    });
  }
}

void AmpCall::lookAt(const Tensor& tensor) {
  if (!isAmp(tensor)) {
    return;
  }
  if (!isToBeCleaned(tensor)) {
    has_wrapped_ = true;
    if (autocast::is_autocast_available(tensor.device().type())) {
      wrapped_ = wrapped_.add(autocast::get_autocast_dispatch_key_from_device_type(tensor.device().type()));
    }
    return;
  }
  if (tensor.has_storage()) {
    to_be_cleaned_.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  if (isUnclean(tensor)) {
    unclean_ = tensor.scalar_type();
  }
}

void AmpCall::keepArguments() {
  if (has_wrapped_ || isInSelfCleaningRegion() || unclean_ != at::ScalarType::Undefined) {
    forEachTensor(stack_, num_arguments_, [this](const Tensor& tensor) { arguments_.push_back(tensor); });
  }
}

// Are there arguments in different floating dtypes, of those that autocast casts?
bool AmpCall::isMixture() const {
  auto first = at::ScalarType::Undefined;
  bool is_mixture = false;
  forEachTensor(stack_, num_arguments_, [&](const Tensor& tensor) {
    if (isLower(tensor) || tensor.scalar_type() == at::kFloat) {
      is_mixture = is_mixture || (first != at::ScalarType::Undefined && tensor.scalar_type() != first);
      first = tensor.scalar_type();
    }
  });
  return is_mixture;
}

bool AmpCall::isUnclean(const Tensor& tensor) const {
  return isToBeCleaned(tensor) && isLower(tensor) && !isAutocastingFor(tensor);
}

// What `zeros_like` and its kin make takes part in what the argument does, as the state of an optimizer with the
// gradients of a parameter, which are in the dtype of that: factories leave nothing to clean.
bool AmpCall::isNothingToClean() const {
  return isViewOnly() || isFactory(op_, torch::jit::last(stack_, num_arguments_)) || isAboutTensorItself() ||
         isWriteAlone();
}

// A view is of the same memory, also for who writes into it. Of these operators some make a copy when they have to
// (`reshape`, `contiguous`, `to`).
bool AmpCall::isViewOnly() const {
  const auto& returns = op_.schema().returns();
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), is_view) &&
         op_.operator_name().name != "aten::view_as_complex";  // there are no complex numbers of the lower precisions
}

// Changes of metadata and autograd's own operators (`_backward`, `retain_grad`, `set_data`), which return nothing.
bool AmpCall::isAboutTensorItself() const {
  return op_.hasTag(at::Tag::inplace_view) ||
         (op_.schema().returns().empty() && written_.size() <= 1 &&
          op_.schema().arguments()[0].type()->kind() == c10::TypeKind::TensorType && isOfPyTorch(op_));
}

// There is nothing that the dtype of what is written could not fit to.
bool AmpCall::isWriteAlone() const {
  if (written_.empty()) {
    return false;
  }
  std::size_t count = 0;
  forEachTensor(stack_, num_arguments_, [&count](const Tensor&) { ++count; });
  return count == 1 || op_.operator_name().name == "aten::copy_";
}

void AmpCall::passOn() {
  const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
  op_.redispatchBoxed(keys_ & kBelowAmp, &stack_);
}

void AmpCall::autocastByIdentity() {
  const IdentityAutocast guard{wrapped_};
  DispatchKeySet keys = keys_ & kBelowAmp;
  for (const DispatchKey key : wrapped_) {
    // Most operators fall through the key, which a redispatch must not be told to do.
    if (op_.hasKernelForDispatchKey(key)) {
      keys = keys.add(key);
    }
  }
  op_.redispatchBoxed(keys, &stack_);
}

void AmpCall::clean() {
  const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
  for (const auto i : c10::irange(num_arguments_)) {
    IValue& argument = torch::jit::peek(stack_, i, num_arguments_);
    argument = cleanArgument(argument, isWritten(op_.schema().arguments()[i]));
  }
  op_.redispatchBoxed(keys_ & kBelowAmp, &stack_);
  writeBack();
}

// Others in a lower precision come along: few operators take a mixture.
IValue AmpCall::cleanArgument(const IValue& value, bool is_written) {
  return mapTensors(value, [this, is_written](const Tensor& tensor) {
    if (!isUnclean(tensor) && (tensor.scalar_type() != unclean_ || isAutocastingFor(tensor))) {
      return tensor;
    }
    if (!is_written) {
      return tensor.to(at::kFloat);
    }
    // What a list has twice is written twice.
    const auto found = std::find_if(cleaned_.begin(), cleaned_.end(),
                                    [&tensor](const Cleaned& cleaned) { return cleaned.original.is_same(tensor); });
    return found == cleaned_.end() ? cleaned_.emplace_back(Cleaned{tensor, tensor.to(at::kFloat)}).in_float32
                                   : found->in_float32;
  });
}

// What is written keeps its dtype, and is what it was.
void AmpCall::writeBack() {
  for (const Cleaned& cleaned : cleaned_) {
    if (cleaned.original.sizes() != cleaned.in_float32.sizes()) {
      cleaned.original.resize_(cleaned.in_float32.sizes());  // as `out=` is
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

template <typename Visitor>
void AmpCall::forEachResult(Visitor visit) const {
  forEachTensor(stack_, op_.schema().returns().size(), visit);
}

// The results of a call with a wrapped argument are wrapped, also what it has written. What shows the key without a
// wrapped argument is a view of one that is to be cleaned: the kernels of views copy the keys, and not the mark. Or it
// is a view of a tensor with an origin, which need not be an AmpTensor (`traced.view_as(to_be_cleaned)`).
void AmpCall::markAlike() {
  const auto mark = [this](const Tensor& tensor) {
    if (!canBeAmp(tensor)) {
      makeOrdinary(tensor);  // the view of an AmpTensor in another dtype
    } else if (has_wrapped_) {
      makeAmp(tensor);
    } else if (tensor.key_set().has(kMarksKey) && isViewOfToBeCleaned(tensor)) {
      markToBeCleaned(tensor);
    }
  };
  forEachResult([this, &mark](const Tensor& result) {
    if (!isArgument(result)) {
      mark(result);
    }
  });
  if (has_wrapped_) {
    std::for_each(written_.begin(), written_.end(), mark);
  }
}

// Operators hand an argument back as it is, be it an AmpTensor or not, where there is nothing to do: one of
// `broadcast_tensors`, which losses call, that has the shape already.
bool AmpCall::isArgument(const Tensor& result) const {
  return std::any_of(arguments_.begin(), arguments_.end(),
                     [&result](const Tensor& argument) { return argument.is_same(result); });
}

// Views of what was there before are as that is, and so is what the call has written.
void AmpCall::markMadeInside() {
  if (has_wrapped_ || !isInSelfCleaningRegion()) {
    return;
  }
  forEachResult([this](const Tensor& result) {
    if (canBeAmp(result) && isAutocastingFor(result) && !isArgumentsStorage(result)) {
      markToBeCleaned(result);
    }
  });
}

bool AmpCall::isArgumentsStorage(const Tensor& result) const {
  return std::any_of(arguments_.begin(), arguments_.end(), [&result](const Tensor& argument) {
    return argument.is_same(result) ||
           (argument.has_storage() && result.has_storage() &&
            argument.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl());
  });
}

bool AmpCall::isViewOfToBeCleaned(const Tensor& result) const {
  return result.has_storage() && std::find(to_be_cleaned_.begin(), to_be_cleaned_.end(),
                                           result.storage().unsafeGetStorageImpl()) != to_be_cleaned_.end();
}

// What a view operator has had to copy is to be cleaned as the argument is, unless it was asked for in another dtype.
// Views of other arguments are as those are (`ordinary.view_as(to_be_cleaned)`).
void AmpCall::markAsArguments() {
  if (unclean_ == at::ScalarType::Undefined || has_wrapped_) {
    return;
  }
  forEachResult([this](const Tensor& result) {
    if (!isAmp(result) && result.scalar_type() == unclean_ && !isArgumentsStorage(result)) {
      markToBeCleaned(result);
    }
  });
}

}  // namespace

ForeseenAmp foreseeAmp(const OperatorHandle& op, DispatchKeySet keys, const Stack& arguments) {
  Stack stack = arguments;
  AmpCall call{op, keys, stack};
  const AmpOutcome outcome = call.decide();
  return {outcome, outcome == AmpOutcome::kAutocasts ? call.autocastKeys() : DispatchKeySet{}};
}

void ampFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (isAskingKernel()) {
    lookAtAskedCall(op, *stack);
  }
  AmpCall{op, keys, *stack}.run();
}

}  // namespace torchext
