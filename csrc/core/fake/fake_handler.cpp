#include "fake_handler.h"

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torchext/fake_tensor.h>

#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../hooks/hooks.h"
#include "cache/call_key.h"
#include "cache/result_recipe.h"
#include "calls/errors.h"
#include "calls/op_traits.h"
#include "calls/recording.h"
#include "fake.h"
#include "meta/device_rules.h"
#include "meta/meta_call.h"
#include "storage/fake_keys.h"
#include "storage/fake_storage.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

constexpr DispatchKeySet kFake{DispatchKey::Fake};

// Handles one call. csrc/README.md lists the steps.
class FakeCall {
 public:
  FakeCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
      : op_{op}, keys_{keys}, stack_{stack}, num_arguments_{op.schema().arguments().size()} {}

  void run() {
    if (const auto outcome = decideEarly()) {
      carryOut({*outcome}, /*key=*/nullptr);
      return;
    }
    hooks().values.prepare(op_, stack_, /*is_prediction=*/false);
    const CallKey key{op_, stack_};
    const auto tensors_without_key = key.isComplete() ? DistinctTensors{} : distinctTensors(arguments());
    tensors_ = key.isComplete() ? key.tensors() : CallTensors{tensors_without_key};
    for (const Tensor* tensor : tensors_) {
      inspectTensor(*tensor);
    }
    c10::SmallVector<std::unique_ptr<CallFollower>, 2> followers;
    for (const FollowCall follow : hooks().followers) {
      if (auto follower = follow(op_, stack_, [this] { return kernelToDecomposeWith().has_value(); })) {
        followers.push_back(std::move(follower));
      }
    }
    const bool may_be_cached = facts_.has_fake || isFakeMode();
    try {
      const bool reads_values = facts_.has_value && hooks().values.areRead(op_, stack_);
      if (!may_be_cached || reads_values || !tryCached(key)) {
        carryOut(decide(), &key);
      }
    } catch (...) {
      for (const auto& follower : followers) {
        follower->fail();
      }
      throw;
    }
    for (const auto& follower : followers) {
      follower->finish(stack_);
    }
  }

  // Does not look up the call in the cache, because a lookup changes the cache.
  FakeDecision predict() {
    if (const auto outcome = decideEarly()) {
      return {*outcome};
    }
    hooks().values.prepare(op_, stack_, /*is_prediction=*/true);
    forEachTensor(arguments(), [this](const Tensor& tensor) {
      facts_.has_fake = facts_.has_fake || isFake(tensor);
      facts_.has_value = facts_.has_value || (isFake(tensor) && hooks().values.has(tensor));
    });
    return decide();
  }

 private:
  c10::ArrayRef<IValue> arguments() const {
    return topOf(stack_, num_arguments_);
  }

  std::optional<FakeOutcome> decideEarly() const {
    if (mustPassToPython()) {
      return FakeOutcome::kPassesOn;
    }
    const bool is_recorded = !isRecording() && hooks().recorder.concerns(op_, stack_);
    return is_recorded ? std::optional{FakeOutcome::kRecords} : std::nullopt;
  }

  FakeDecision decide() const {
    if (!concernsFakes()) {
      return {FakeOutcome::kRunsReal};
    }
    if (isLiftFresh(op_)) {
      return {FakeOutcome::kLifts};
    }
    if (isPinMemory(op_)) {
      return {FakeOutcome::kPins};
    }
    try {
      hooks().layouts.refuse(op_, stack_);
    } catch (const c10::Error&) {
      return {FakeOutcome::kRefuses, {}, std::current_exception()};
    }
    return decideHowToFake();
  }

  // The effects of a composite operator are those of the operators that it calls, so those are handled instead.
  // Composites arrive here undecomposed if autograd is skipped, as in inference mode. Random ones always do.
  FakeDecision decideHowToFake() const {
    if (kernelToDecomposeWith()) {
      return {FakeOutcome::kDecomposes};
    }
    const OwnComputation own;
    for (const CallHandler* handler : hooks().handlers) {
      if (const auto handled = handler->decide(op_, stack_, facts_)) {
        const auto outcome = handled->refusal ? FakeOutcome::kRefuses : FakeOutcome::kHandled;
        return {outcome, {}, handled->refusal, handler, *handled};
      }
    }
    return {FakeOutcome::kRunsOnMeta, planOnMeta(op_, stack_)};
  }

  void carryOut(const FakeDecision& decision, const CallKey* key) {
    switch (decision.outcome) {
      case FakeOutcome::kPassesOn:
        op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
        break;
      case FakeOutcome::kRecords:
        hooks().recorder.record(op_, keys_, &stack_);
        break;
      case FakeOutcome::kRunsReal:
        runOnRealTensors();
        break;
      case FakeOutcome::kLifts:
        liftConstant();
        break;
      case FakeOutcome::kPins:
        pinMemory();
        break;
      case FakeOutcome::kDecomposes:
        decompose();
        break;
      case FakeOutcome::kHandled:
        decision.handler->run(op_, keys_ & kBelowFake, stack_);
        break;
      case FakeOutcome::kRunsOnMeta:
        runOnMetaAndCache(decision.plan, *key);
        break;
      case FakeOutcome::kRefuses:
        std::rethrow_exception(decision.refusal);
    }
  }

  std::optional<DispatchKey> kernelToDecomposeWith() const {
    if (const auto composite = compositeKernelOf(op_)) {
      return composite;
    }
    for (const DecomposeCall kernel_of : hooks().decompositions) {
      if (const auto kernel = kernel_of(op_, arguments())) {
        return kernel;
      }
    }
    return std::nullopt;
  }

  void inspectTensor(const Tensor& tensor) {
    if (isFake(tensor)) {
      facts_.has_fake = true;
      facts_.has_value = facts_.has_value || hooks().values.has(tensor);
      return;
    }
    facts_.has_checked = facts_.has_checked || hooks().values.mayBeChecked(tensor);
    if (tensor.key_set().has(DispatchKey::Fake)) {
      dropStaleKeys(tensor);
    }
  }

  // The user's modes and subclasses must receive the operator before it is faked. Before 2.13 their key is below ours.
  bool mustPassToPython() const {
    return keys_.has(DispatchKey::Python) && kBelowFake.has(DispatchKey::Python);
  }

  bool concernsFakes() const {
    return facts_.has_fake || (isFakeMode() && (isFactory(op_, arguments()) || isAboutNumbers(arguments()) ||
                                                namesFakeDevice(op_, stack_)));
  }

  bool tryCached(const CallKey& key) {
    const auto recipe = metadataCache().find(key);
    // While recording, the recorder may run the call for real.
    if (recipe == nullptr || (recipe->refuses() && isRecording()) || !recipe->canBeMade(tensors_)) {
      return false;
    }
    if (!recipe->refuses() && !recipe->changesArguments() && hooks().hit_checks.areDue()) {
      hooks().hit_checks.check(op_, *recipe, [&] {
        try {
          return recompute();
        } catch (const UnsupportedOperatorError&) {
          // While recording, operators without a Meta kernel are run for real instead of on zeros.
          if (!isRecording()) {
            throw;
          }
          return recipe;
        }
      });
    }
    Results results = make(*recipe);
    countMemory(recipe->scratch(), results);
    finish(std::move(results), recipe->makesValues());
    return true;
  }

  // Describes a cached call again: NOTE [Checking hits]. Not called for recipes that resize.
  std::shared_ptr<const ResultRecipe> recompute() const {
    const OwnComputation own;
    const FakeDecision decision = decide();
    if (decision.outcome != FakeOutcome::kRunsOnMeta) {
      return nullptr;
    }
    HeldWarnings warnings;
    const auto recipe = describeOnMeta(op_, stack_, tensors_, decision.plan);
    if (!recipe->isRepeatable() || recipe->changesArguments()) {
      warnings.consume();
      return nullptr;
    }
    const Results results = recipe->make(tensors_);
    recipe->complete(makesValues(results), scratchOf(results));
    takeUncounted();
    warnings.consume();
    return recipe;
  }

  // Kernels call factories to allocate their results, which must not be fake.
  void runOnRealTensors() {
    const c10::impl::ExcludeDispatchKeyGuard guard{kFake};
    op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
  }

  void liftConstant() {
    const Tensor constant = torch::jit::pop(stack_).toTensor();
    if (isFake(constant)) {
      torch::jit::push(stack_, constant);
      return;
    }
    Tensor fake = fakeLike(constant);
    if (isPlain(constant)) {
      fake.storage().unsafeGetStorageImpl()->set_resizable(constant.storage().resizable());  // not that of an array
    }
    if (!isRecording() && isPlain(constant)) {
      hooks().values.share(fake, constant);
    }
    torch::jit::push(stack_, std::move(fake));
    countMemory(/*scratch=*/nullptr, arguments());
  }

  // A copy with the same strides.
  void pinMemory() {
    at::accelerator::getAccelerator(/*checked=*/true);  // without one, raises the error of pinning real memory
    const Tensor self = torch::jit::peek(stack_, 0, num_arguments_).toTensor();
    torch::jit::drop(stack_, num_arguments_);
    const FakeFactoriesGuard guard;
    const Tensor pinned = at::empty_strided(self.sizes(), self.strides(), self.options().pinned_memory(true));
    hooks().values.copy(pinned, self);
    torch::jit::push(stack_, pinned);
  }

  void decompose() {
    if (const auto kernel = kernelToDecomposeWith()) {
      const ResizableOutputs outputs{op_, stack_};
      op_.callBoxedForDispatchKey(*kernel, stack_);
    }
  }

  void runOnMetaAndCache(const MetaPlan& plan, const CallKey& key) {
    const OwnComputation own;
    HeldWarnings warnings;
    const auto recipe = describeOnMeta(op_, stack_, tensors_, plan);
    const auto remember = [&] {
      // A call that warns is not cached, because it must warn again.
      const bool can_be_repeated = key.isComplete() && recipe->isRepeatable() && warnings.isEmpty();
      metadataCache().remember(key, can_be_repeated ? recipe : nullptr);
    };
    if (recipe->refuses()) {
      remember();
    }
    Results results = make(*recipe);
    const bool has_new = takeUncounted();  // before scratchOf(), which may run Python: nested calls take the flag
    recipe->complete(makesValues(results), scratchOf(results));
    countCall(op_, arguments(), recipe->scratch(), results, has_new);
    remember();
    finish(std::move(results), recipe->makesValues());
  }

  Results make(const ResultRecipe& recipe) const {
    if (recipe.refuses() && facts_.has_value) {  // the real kernel may have written a part, as that of `mean.out` has
      forEachWritten(op_.schema(), arguments(),
                     [](const Tensor& tensor, std::size_t) { hooks().values.forget(IValue{tensor}); });
    }
    return recipe.make(tensors_);
  }

  std::shared_ptr<const KernelScratch> scratchOf(c10::ArrayRef<IValue> results) const {
    MemoryCounter* counter = memoryCounter();
    return counter == nullptr ? nullptr : counter->scratchOf(op_, arguments(), results);
  }

  // NOTE [Counting memory by storage]
  void countMemory(const KernelScratch* scratch, c10::ArrayRef<IValue> results) const {
    countCall(op_, arguments(), scratch, results, takeUncounted());
  }

  // Makes values, except for recorded calls, and replaces the arguments by the results.
  void finish(Results results, bool makes_values) {
    {
      const OwnComputation own;
      hooks().values.follow(op_, arguments(), results, facts_, makes_values && !isRecording() && isFakeMode());
    }
    replaceTop(stack_, num_arguments_, std::move(results));
  }

  bool makesValues(c10::ArrayRef<IValue> results) const {
    return hooks().values.areMade(op_, arguments(), results, facts_.has_fake);
  }

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const std::size_t num_arguments_;
  CallTensors tensors_;
  ArgumentFacts facts_;
};

}  // namespace

bool isFakeMode() {
  return areFactoriesFake() && !isInKernelOfFakeTensorMode();
}

void countCall(
    const OperatorHandle& op, Arguments arguments, const KernelScratch* scratch, Arguments results, bool has_new) {
  if (isRecording() || isInFakeImplementation()) {
    if (has_new) {
      forEachTensor(results, [](const Tensor& result) { dismissStorage(result.storage()); });
    }
    return;
  }
  MemoryCounter* const counter = memoryCounter();
  if (has_new || scratch != nullptr) {
    counter->runKernel(op, scratch, results);
  }
  if (counter != nullptr) {
    counter->observe(op, arguments, results);
  }
}

FakeDecision predictFake(const OperatorHandle& op, DispatchKeySet keys, const Stack& arguments) {
  Stack stack = arguments;
  return FakeCall{op, keys, stack}.predict();
}

void fakeFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  try {
    FakeCall{op, keys, *stack}.run();
  } catch (const DataDependentError& error) {
    if (hooks().values.answer(op, *stack)) {
      return;
    }
    if (!isInSparseKernel()) {
      translateError(ErrorKind::kDataDependent, error);
    }
    throw;
  } catch (const UnsupportedOperatorError& error) {
    // While recording, the recorder runs the operator for real.
    if (!isInSparseKernel() && !isRecording()) {
      translateError(ErrorKind::kUnsupportedOperator, error);
    }
    throw;
  }
}

}  // namespace torchext
