#include "fake_handler.h"

#include <iterator>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../resize.h"
#include "../stack_utils.h"
#include "cache/call_key.h"
#include "cache/metadata_cache.h"
#include "cache/result_recipe.h"
#include "collectives/collectives.h"
#include "errors.h"
#include "fake.h"
#include "layouts/other_layouts.h"
#include "layouts/sparse_call.h"
#include "meta/device_rules.h"
#include "meta/meta_call.h"
#include "op_traits.h"
#include "recording.h"
#include "storage/fake_storage.h"
#include "values/known_values.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

constexpr DispatchKeySet kFake{DispatchKey::Fake};
const DispatchKeySet kBelowFake{DispatchKeySet::FULL_AFTER, DispatchKey::Fake};

bool isFakeMode() {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake) && !isInKernelOfFakeTensorMode();
}

// Handles one call. csrc/README.md tells the steps.
class FakeCall {
 public:
  FakeCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
      : op_{op}, keys_{keys}, stack_{stack}, num_arguments_{op.schema().arguments().size()} {}

  void run();
  FakeOutcome foresee();

 private:
  void lookAtArguments(const CallKey& key);
  void lookAt(const Tensor& tensor);
  bool isPythonsFirst() const;
  bool isAboutFakes() const;
  static void countVersions(const IValue& written_by_foreach);
  void runOnRealTensors();
  FakeOutcome foreseeMeta() const;
  FakeOutcome decide() const;
  FakeOutcome decideHowToFake() const;
  FakeOutcome decideHowToCommunicate() const;
  bool canRunOnValues() const;
  bool tryRemembered(const CallKey& key);
  void compute(const CallKey& key);
  void computeAsFake(const CallKey& key);
  void liftConstant();
  void pinMemory();
  void decompose();
  void runOnKnownValues();
  void runOnMetaAndRemember(const CallKey& key);

  void followValues(c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) const;

  std::ptrdiff_t numArguments() const noexcept {
    return static_cast<std::ptrdiff_t>(num_arguments_);
  }

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const std::size_t num_arguments_;
  bool has_fake_ = false;
  bool may_have_known_ = false;
};

void FakeCall::run() {
  if (isPythonsFirst()) {
    op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
    return;
  }
  if (tryRecordForHandler(op_, keys_, &stack_)) {
    return;
  }
  const CallKey key{op_, stack_};
  lookAtArguments(key);
  const IValue written = has_fake_ && writesForeach(op_) ? torch::jit::peek(stack_, 0, num_arguments_) : IValue{};
  if (!has_fake_ && !isFakeMode()) {
    runOnRealTensors();
  } else if (!tryRemembered(key)) {
    compute(key);
  }
  countVersions(written);
}

// Nothing is looked up in the cache for this: asking it would change what it holds.
FakeOutcome FakeCall::foresee() {
  if (isPythonsFirst()) {
    return FakeOutcome::kPassesOn;
  }
  forEachTensor(stack_, num_arguments_, [this](const Tensor& tensor) {
    has_fake_ = has_fake_ || isFake(tensor);
    may_have_known_ = may_have_known_ || (isFake(tensor) && mayBeKnown(tensor));
  });
  const FakeOutcome outcome = decide();
  return outcome == FakeOutcome::kRunsOnMeta ? foreseeMeta() : outcome;
}

// As `MetaCall::checkCanBeFaked()` decides.
FakeOutcome FakeCall::foreseeMeta() const {
  if (isResizeToSameSize(op_, stack_)) {
    return FakeOutcome::kDoesNothing;
  }
  if (lacksValues(op_, stack_)) {
    return FakeOutcome::kLacksValues;
  }
  return op_.hasComputedKernelForDispatchKey(DispatchKey::Meta) ? FakeOutcome::kRunsOnMeta : FakeOutcome::kLacksMeta;
}

FakeOutcome FakeCall::decide() const {
  if (!isAboutFakes()) {
    return FakeOutcome::kRunsReal;
  }
  if (isLiftFresh(op_)) {
    return FakeOutcome::kLifts;
  }
  return isPinMemory(op_) ? FakeOutcome::kPins : decideHowToFake();
}

// A composite operator does what the operators that it calls do, so let those come here. They arrive here whole when
// autograd is skipped, as in inference mode; the random ones always do.
FakeOutcome FakeCall::decideHowToFake() const {
  if (compositeKernelOf(op_)) {
    return FakeOutcome::kDecomposes;
  }
  if (has_fake_ && communicationOf(op_) != Communication::kNone) {
    return decideHowToCommunicate();
  }
  if (isAboutSparse(op_, topOf(stack_, num_arguments_))) {
    return FakeOutcome::kRunsOnSparse;
  }
  return canRunOnValues() ? FakeOutcome::kRunsOnValues : FakeOutcome::kRunsOnMeta;
}

FakeOutcome FakeCall::decideHowToCommunicate() const {
  switch (foreseeCollective(op_, topOf(stack_, num_arguments_))) {
    case CollectiveOutcome::kRefused:
      return FakeOutcome::kRefuses;
    case CollectiveOutcome::kRunsKernel:
      return FakeOutcome::kCommunicates;
    case CollectiveOutcome::kRunsReal:
      return FakeOutcome::kSynchronizes;
    case CollectiveOutcome::kRunsOnMeta:
      break;
  }
  return FakeOutcome::kRunsOnMeta;
}

// NOTE [Constants keep their values]
bool FakeCall::canRunOnValues() const {
  return may_have_known_ && needsValues(op_, stack_) && areValuesKnown(op_, topOf(stack_, num_arguments_));
}

void FakeCall::compute(const CallKey& key) {
  if (!isAboutFakes()) {
    runOnRealTensors();
  } else if (isLiftFresh(op_)) {
    liftConstant();
  } else if (isPinMemory(op_)) {
    pinMemory();
  } else {
    refuseOtherLayouts(op_, stack_);
    computeAsFake(key);
  }
}

void FakeCall::computeAsFake(const CallKey& key) {
  switch (decideHowToFake()) {
    case FakeOutcome::kDecomposes:
      decompose();
      break;
    case FakeOutcome::kRefuses:
      refuseCollective(op_, topOf(stack_, num_arguments_));
      break;
    case FakeOutcome::kSynchronizes:
      synchronizeForReal(op_, stack_);
      break;
    case FakeOutcome::kCommunicates:
      runCollective(op_, keys_ & kBelowFake, stack_);
      break;
    case FakeOutcome::kRunsOnSparse:
      runOnSparse(op_, stack_);
      break;
    case FakeOutcome::kRunsOnValues:
      runOnKnownValues();
      break;
    default:
      runOnMetaAndRemember(key);
  }
}

void FakeCall::lookAtArguments(const CallKey& key) {
  if (key.isComplete()) {
    for (const Tensor* tensor : key.tensors()) {
      lookAt(*tensor);
    }
  } else {
    forEachTensor(stack_, num_arguments_, [this](const Tensor& tensor) { lookAt(tensor); });
  }
}

void FakeCall::lookAt(const Tensor& tensor) {
  if (isFake(tensor)) {
    has_fake_ = true;
    may_have_known_ = may_have_known_ || mayBeKnown(tensor);
  } else if (tensor.key_set().has(DispatchKey::Fake)) {
    dropStaleKeys(tensor);
  }
}

// Modes and subclasses of the user's see the operator before it is faked. Before 2.13 their key is below ours.
bool FakeCall::isPythonsFirst() const {
  return keys_.has(DispatchKey::Python) && kBelowFake.has(DispatchKey::Python);
}

bool FakeCall::isAboutFakes() const {
  const auto arguments = topOf(stack_, num_arguments_);
  return has_fake_ || (isFakeMode() && (isFactory(op_, arguments) || isAboutNumbers(arguments) ||
                                        DeviceRules(op_, stack_).namesFakeDevice()));
}

bool FakeCall::tryRemembered(const CallKey& key) {
  const auto recipe = metadataCache().find(key);
  if (recipe == nullptr) {
    return false;
  }
  Results results = recipe->make(key.tensors());
  followValues(topOf(stack_, num_arguments_), results);
  torch::jit::drop(stack_, num_arguments_);
  std::move(results.begin(), results.end(), std::back_inserter(stack_));
  return true;
}

// The versions of what the foreach operators write are not counted by the kernel of `ADInplaceOrView`, but by what real
// kernels call for each tensor. This refuses inference tensors outside of inference mode, too, as it does there.
void FakeCall::countVersions(const IValue& written_by_foreach) {
  if (!c10::impl::tls_is_dispatch_key_excluded(DispatchKey::ADInplaceOrView)) {
    forEachTensor(written_by_foreach, [](const Tensor& written) { written.unsafeGetTensorImpl()->bump_version(); });
  }
}

// Kernels allocate their results with factories of their own, which must not be fake then.
void FakeCall::runOnRealTensors() {
  const c10::impl::ExcludeDispatchKeyGuard guard{kFake};
  op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
}

void FakeCall::liftConstant() {
  const Tensor constant = torch::jit::pop(stack_).toTensor();
  if (isFake(constant)) {
    torch::jit::push(stack_, constant);
    return;
  }
  Tensor fake = fakeLike(constant);
  if (constant.numel() == 1) {
    rememberValue(fake, constant);
  }
  torch::jit::push(stack_, std::move(fake));
}

// There is nothing to pin; what remains is a copy with the same strides.
void FakeCall::pinMemory() {
  at::accelerator::getAccelerator(/*checked=*/true);  // raises what pinning real memory raises without one
  const Tensor self = torch::jit::peek(stack_, 0, num_arguments_).toTensor();
  torch::jit::drop(stack_, num_arguments_);
  const c10::impl::IncludeDispatchKeyGuard guard{kFake};
  torch::jit::push(stack_, at::empty_strided(self.sizes(), self.strides(), self.options()));
}

void FakeCall::decompose() {
  if (const auto composite = compositeKernelOf(op_)) {
    op_.callBoxedForDispatchKey(*composite, stack_);
  }
}

void FakeCall::runOnKnownValues() {
  Stack values = runOnValues(op_, topOf(stack_, num_arguments_));
  mapTensors(values, values.size(), [](const Tensor& value) {
    Tensor fake = fakeLike(value);
    rememberValue(fake, value);
    return fake;
  });
  torch::jit::drop(stack_, num_arguments_);
  std::move(values.begin(), values.end(), std::back_inserter(stack_));
}

void FakeCall::runOnMetaAndRemember(const CallKey& key) {
  const Stack arguments(stack_.end() - numArguments(), stack_.end());
  runOnMeta(op_, stack_);
  const c10::ArrayRef<IValue> results = topOf(stack_, op_.schema().returns().size());
  // A call that changes the metadata of its arguments has another effect each time.
  const CallKey key_after{op_, arguments};
  metadataCache().remember(key, key.isComplete() && key_after.words() == key.words()
                                    ? ResultRecipe::learn(op_, key_after.tensors(), results)
                                    : nullptr);
  followValues(arguments, results);
}

void FakeCall::followValues(c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) const {
  if (may_have_known_ ||
      (isFakeMode() && haveOneElement(results) && (isFactory(op_, arguments) || isAboutNumbers(arguments)))) {
    torchext::followValues(op_, arguments, results);
  }
}

}  // namespace

FakeOutcome foreseeFake(const OperatorHandle& op, DispatchKeySet keys, const Stack& arguments) {
  Stack stack = arguments;
  return FakeCall{op, keys, stack}.foresee();
}

void fakeFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  try {
    FakeCall{op, keys, *stack}.run();
  } catch (const DataDependentError& error) {
    if (!isInSparseKernel()) {
      translateError(ErrorKind::kDataDependent, error);
    }
    throw;
  } catch (const UnsupportedOperatorError& error) {
    // The recorder runs the operator for real then.
    if (!isInSparseKernel() && !isRecording()) {
      translateError(ErrorKind::kUnsupportedOperator, error);
    }
    throw;
  }
}

}  // namespace torchext
