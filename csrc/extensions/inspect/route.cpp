#include "route.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>

#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../../core/deferred_init/record/recorder.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/support/stack_utils.h"
#include "../amp/amp_handler.h"
#include "../marks/tensor_marks.h"
#include "dispatch_table.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

DispatchKeySet below(DispatchKey key) {
  return {DispatchKeySet::FULL_AFTER, key};
}

// Returns true for the keys below `BackendSelect`: dense backends, sparse, quantized, nested. Their kernels end a
// route.
bool isBackend(DispatchKey key) {
  return c10::toFunctionalityKey(key) < DispatchKey::BackendSelect;
}

bool isAutograd(DispatchKey key) {
  return key == DispatchKey::AutogradOther || c10::toFunctionalityKey(key) == DispatchKey::AutogradFunctionality ||
         key == DispatchKey::AutogradNestedTensor;
}

bool isAutocast(DispatchKey key) {
  return !isBackend(key) && c10::autocast_dispatch_keyset.has(key);
}

bool isFuncTorch(DispatchKey key) {
  switch (key) {
    case DispatchKey::FuncTorchDynamicLayerFrontMode:
    case DispatchKey::FuncTorchDynamicLayerBackMode:
    case DispatchKey::FuncTorchBatched:
    case DispatchKey::FuncTorchVmapMode:
    case DispatchKey::BatchedNestedTensor:
      return true;
    default:
      return false;
  }
}

// Returns true for the keys of views that are conjugated, negated or filled with zeros on reads.
bool isLazy(DispatchKey key) {
  return key == DispatchKey::Conjugate || key == DispatchKey::Negative || key == DispatchKey::ZeroTensor;
}

// Returns true for alias keys whose kernels only call other operators, and inherit differentiability, batching and so
// on from them. `CompositeExplicitAutograd` is not among them: its kernels replace those of a backend.
bool isComposite(std::string_view origin) {
  return origin == "CompositeImplicitAutograd" || origin == "CompositeImplicitAutogradNestedTensor" ||
         origin == "FuncTorchBatchedDecomposition";
}

constexpr const char* kRunsForReal = "cannot be faked, so deferred_init runs it for real";

std::string firstSentence(const std::string& message) {
  return message.substr(0, std::min(message.find(". "), message.find('\n')));
}

// Follows one call: NOTE [Following a call].
class RouteWalk {
 public:
  RouteWalk(const OperatorHandle& op, const Stack& arguments);

  std::vector<RouteStep> run();

 private:
  // Returns the initial key set of the dispatcher, including keys that fall through.
  DispatchKeySet keysAtStart() const;

  void visit(DispatchKey key);
  void note(DispatchKey key, const TableEntry& entry, RouteTurn turn, std::string comment = {});
  void skip(DispatchKey key, const TableEntry& entry);

  // Repeat the decisions of the kernels.
  void follow(DispatchKey key, const TableEntry& entry);
  FakeDecision predictFakeOnTheWay() const;
  void followFake(const TableEntry& entry);
  void followHandled(const TableEntry& entry, const HandledCall& handled);
  void followMeta(const TableEntry& entry, MetadataKernel kernel);
  void followRefusal(const TableEntry& entry, const std::exception_ptr& error);
  void followRecorder(const TableEntry& entry);
  void followRecorderBelowAutograd(const TableEntry& entry);
  void followMarks(const TableEntry& entry);
  void followComposites(const TableEntry& entry);
  void followBackendSelect(const TableEntry& entry);
  void passOn(DispatchKey key, const TableEntry& entry, std::string comment = {});
  void end(DispatchKey key, const TableEntry& entry, RouteTurn turn, std::string comment = {});

  std::optional<DispatchKey> selectedBackend() const;
  bool hasTensors() const;

  const OperatorHandle& op_;
  const Stack& arguments_;
  // The keys of the tensor arguments and of the thread.
  const DispatchKeySet all_keys_;
  // The keys that kernels on the route have included in, and excluded from, those of the thread.
  DispatchKeySet included_;
  DispatchKeySet excluded_;
  // The keys that were reported as falling through: keys may be visited twice.
  DispatchKeySet skipped_;
  // The key set that the next kernel will get.
  DispatchKeySet keys_;
  // The recorder of deferred_init made the call. It runs operators that cannot be faked on real tensors.
  bool is_recorded_ = false;
  bool has_ended_ = false;
  std::vector<RouteStep> steps_;
};

// Makes a new extractor, which, unlike the operator's own, does not leave out keys that fall through.
RouteWalk::RouteWalk(const OperatorHandle& op, const Stack& arguments)
    : op_{op},
      arguments_{arguments},
      all_keys_{c10::DispatchKeyExtractor::make(op.schema()).getDispatchKeySetBoxed(&arguments)},
      keys_{all_keys_} {}

DispatchKeySet RouteWalk::keysAtStart() const {
  return (all_keys_ | included_) - excluded_;
}

std::vector<RouteStep> RouteWalk::run() {
  while (!has_ended_) {
    visit(keys_.highestPriorityTypeId());
  }
  return std::move(steps_);
}

void RouteWalk::visit(DispatchKey key) {
  const TableEntry entry = tableEntry(op_, key);
  if (!entry.kernel.isValid() || entry.origin == "none") {
    end(key, entry, RouteTurn::kRaises, firstSentence(missingKernelMessage(op_, key)));
  } else if (entry.kernel.isFallthrough() && key == DispatchKey::Undefined) {
    end(key, entry, RouteTurn::kRaises, "the kernel falls through, but there is no key below");
  } else if (entry.kernel.isFallthrough()) {
    skip(key, entry);
  } else {
    follow(key, entry);
  }
}

void RouteWalk::note(DispatchKey key, const TableEntry& entry, RouteTurn turn, std::string comment) {
  steps_.push_back({key, turn, entry.origin, entry.source, entry.is_python, std::move(comment)});
}

void RouteWalk::skip(DispatchKey key, const TableEntry& entry) {
  if (!skipped_.has(key)) {
    skipped_ = skipped_.add(key);
    note(key, entry, RouteTurn::kSkipped);
  }
  keys_ = keys_ & below(key);
}

void RouteWalk::follow(DispatchKey key, const TableEntry& entry) {
  // The few kernels for lazy views that are not the fallback compute the result by other operators, as
  // `mul_zerotensor()` does.
  if (isComposite(entry.origin) || (isLazy(key) && entry.origin != "fallback")) {
    end(key, entry, RouteTurn::kDecomposes);
  } else if (key == DispatchKey::Undefined || isBackend(key)) {
    end(key, entry, RouteTurn::kComputes);
  } else if (key == DispatchKey::Fake) {
    followFake(entry);
  } else if (key == DispatchKey::DeferredInit) {
    followRecorder(entry);
  } else if (key == kMarksKey) {
    followMarks(entry);
  } else if (key == kCompositesKey) {
    followComposites(entry);
  } else if (key == DispatchKey::BackendSelect) {
    followBackendSelect(entry);
  } else if (isAutocast(key)) {
    note(key, entry, RouteTurn::kStartsOver, "casts the arguments");
    excluded_ = excluded_.add(key);
    keys_ = keysAtStart();
  } else if (isFuncTorch(key)) {
    end(key, entry, RouteTurn::kDecomposes, "the innermost transform of torch.func handles the call from here");
  } else if (key == DispatchKey::Functionalize) {
    end(key, entry, RouteTurn::kDecomposes, "makes the call without mutations on the wrapped tensors");
  } else if (key == DispatchKey::Python) {
    end(key, entry, RouteTurn::kCallsPython, "a __torch_dispatch__ handles the call from here");
  } else if (key == DispatchKey::PythonDispatcher) {
    end(key, entry, RouteTurn::kCallsPython, "the dispatcher that is written in Python handles the call from here");
  } else {
    passOn(key, entry);
  }
}

void RouteWalk::passOn(DispatchKey key, const TableEntry& entry, std::string comment) {
  note(key, entry, RouteTurn::kPassesOn, std::move(comment));
  // The kernels of all autograd keys mask with `after_autograd_keyset`.
  keys_ = keys_ & below(isAutograd(key) ? DispatchKey::AutogradOther : key);
}

void RouteWalk::end(DispatchKey key, const TableEntry& entry, RouteTurn turn, std::string comment) {
  note(key, entry, turn, std::move(comment));
  has_ended_ = true;
}

FakeDecision RouteWalk::predictFakeOnTheWay() const {
  const c10::impl::IncludeDispatchKeyGuard include{included_};
  const c10::impl::ExcludeDispatchKeyGuard exclude{excluded_};
  std::optional<FakeFactoriesGuard> factories;
  if (included_.has(DispatchKey::Fake)) {
    factories.emplace();
  }
  std::optional<RecordingGuard> recording;
  if (is_recorded_) {
    recording.emplace(/*can_run_for_real=*/true);
  }
  return predictFake(op_, keys_, arguments_);
}

void RouteWalk::followFake(const TableEntry& entry) {
  constexpr DispatchKey key = DispatchKey::Fake;
  const FakeDecision decision = predictFakeOnTheWay();
  if (const std::exception_ptr error = decision.error()) {
    followRefusal(entry, error);
    return;
  }
  switch (decision.outcome) {
    case FakeOutcome::kPassesOn:
      passOn(key, entry);
      break;
    case FakeOutcome::kRecords:
      followRecorderBelowAutograd(entry);
      break;
    case FakeOutcome::kRunsReal:
      passOn(key, entry, "the call does not involve fake tensors");
      excluded_ = excluded_.add(key);
      break;
    case FakeOutcome::kLifts:
      end(key, entry, RouteTurn::kComputes, "makes a fake of the constant");
      break;
    case FakeOutcome::kPins:
      end(key, entry, RouteTurn::kComputes, "copies the metadata");
      break;
    case FakeOutcome::kDecomposes:
      end(key, entry, RouteTurn::kDecomposes, "runs the composite kernel");
      break;
    case FakeOutcome::kRunsInLayout:
      end(key, entry, RouteTurn::kDecomposes, "runs the kernel of the layout on fake members");
      break;
    case FakeOutcome::kHandled:
      followHandled(entry, decision.handled);
      break;
    case FakeOutcome::kRunsOnMeta:
      followMeta(entry, decision.plan.kernel);
      break;
    case FakeOutcome::kRefuses:
      break;  // handled above: it has an error
  }
}

void RouteWalk::followHandled(const TableEntry& entry, const HandledCall& handled) {
  constexpr DispatchKey key = DispatchKey::Fake;
  switch (handled.effect) {
    case HandledCall::Effect::kComputes:
      end(key, entry, RouteTurn::kComputes, handled.description);
      break;
    case HandledCall::Effect::kDecomposes:
      end(key, entry, RouteTurn::kDecomposes, handled.description);
      break;
    case HandledCall::Effect::kPassesOn:
      passOn(key, entry, handled.description);
      included_ = included_.add(key);
  }
}

void RouteWalk::followMeta(const TableEntry& entry, MetadataKernel kernel) {
  constexpr DispatchKey key = DispatchKey::Fake;
  switch (kernel) {
    case MetadataKernel::kMeta:
      note(key, entry, RouteTurn::kPassesOn, "calls the Meta kernel for the metadata, unless they are cached");
      keys_ = DispatchKeySet{DispatchKey::Meta};
      break;
    case MetadataKernel::kComposite:
      end(key, entry, RouteTurn::kDecomposes,
          "calls the composite kernel for the metadata, on the meta device, unless they are cached");
      break;
    case MetadataKernel::kOwn:
      end(key, entry, RouteTurn::kComputes, "makes fakes by a rule of torchext");
      break;
    case MetadataKernel::kZeros:
      end(key, entry, RouteTurn::kDecomposes, "calls the CPU kernel for the metadata, on zeros");
      break;
    case MetadataKernel::kMissing:
      if (is_recorded_) {
        end(key, entry, RouteTurn::kDecomposes, kRunsForReal);
      } else {
        end(key, entry, RouteTurn::kRaises, "the operator has no Meta kernel");
      }
  }
}

void RouteWalk::followRefusal(const TableEntry& entry, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError& refusal) {
    if (is_recorded_) {
      end(DispatchKey::Fake, entry, RouteTurn::kDecomposes, kRunsForReal);
    } else {
      end(DispatchKey::Fake, entry, RouteTurn::kRaises, firstSentence(refusal.what_without_backtrace()));
    }
  } catch (const c10::Error& refusal) {
    end(DispatchKey::Fake, entry, RouteTurn::kRaises, firstSentence(refusal.what_without_backtrace()));
  }
}

void RouteWalk::followRecorder(const TableEntry& entry) {
  constexpr DispatchKey key = DispatchKey::DeferredInit;
  switch (predictRecorder(op_, keys_, arguments_)) {
    case RecorderOutcome::kPassesOn:
      passOn(key, entry, "the handler of Fake records the call; calls by the kernels in between come here again");
      keys_ = keys_.add(DispatchKey::Fake);
      break;
    case RecorderOutcome::kPassesOnBelow:
      passOn(key, entry, "the call does not involve deferred tensors");
      excluded_ = excluded_.add(key);
      break;
    case RecorderOutcome::kLifts:
      end(key, entry, RouteTurn::kComputes, "keeps the bytes of the constant");
      break;
    case RecorderOutcome::kCommunicates:
      end(key, entry, RouteTurn::kDecomposes, "makes the deferred arguments real, and is called again");
      break;
    case RecorderOutcome::kSynchronizes:
      end(key, entry, RouteTurn::kDecomposes, "makes the call now, on a real tensor");
      break;
    default:
      passOn(key, entry, "calls by the kernels below come here again");
  }
}

// NOTE [Recording below autograd]
void RouteWalk::followRecorderBelowAutograd(const TableEntry& entry) {
  constexpr DispatchKey key = DispatchKey::Fake;
  switch (predictRecorderBelowAutograd(op_, keys_, arguments_)) {
    case RecorderOutcome::kCommunicates:
      end(key, entry, RouteTurn::kDecomposes, "makes the deferred arguments real, and is called again");
      break;
    case RecorderOutcome::kSynchronizes:
      end(key, entry, RouteTurn::kDecomposes, "makes the call now, on a real tensor");
      break;
    case RecorderOutcome::kShows:
      passOn(key, entry, "the tensor becomes deferred");
      excluded_ = excluded_.add(key);
      break;
    case RecorderOutcome::kRunsForReal:
      passOn(key, entry, "deferred_init makes the call now, on the values of the deferred arguments");
      excluded_ = excluded_.add(key);
      break;
    default:
      is_recorded_ = true;
      excluded_ = excluded_.add(DispatchKey::DeferredInit);
      included_ = included_.add(key);
      followFake(entry);
  }
}

// NOTE [Marked tensors]
void RouteWalk::followMarks(const TableEntry& entry) {
  const AmpPrediction predicted = predictAmp(op_, arguments_);
  switch (predicted.outcome) {
    case AmpOutcome::kPassesOn:
    case AmpOutcome::kPassesOnInBackward:
      passOn(kMarksKey, entry, "marks the results");
      break;
    case AmpOutcome::kAutocasts:
      passOn(kMarksKey, entry, "autocasts, because an argument is an AmpTensor");
      break;
    case AmpOutcome::kCleans:
      passOn(kMarksKey, entry, "casts results of a self-cleaning region to float32");
  }
  excluded_ = excluded_.add(kMarksKey);
  for (const DispatchKey key : predicted.autocast_keys) {
    keys_ = keys_.add(key);
  }
}

// NOTE [Composites that read memory]
void RouteWalk::followComposites(const TableEntry& entry) {
  if (op_.operator_name().name == "aten::max_pool1d") {
    end(kCompositesKey, entry, RouteTurn::kDecomposes);
  } else {
    passOn(kCompositesKey, entry);
  }
}

// The generated kernels compute the key set anew, with the backend that `dtype`, `layout` and `device` name. It
// contains the keys of tensor arguments and of the thread only if there are tensor arguments.
void RouteWalk::followBackendSelect(const TableEntry& entry) {
  constexpr DispatchKey key = DispatchKey::BackendSelect;
  const auto backend = selectedBackend();
  if (!backend) {
    end(key, entry, RouteTurn::kDecomposes, "chooses the backend by its own rule");
    return;
  }
  note(key, entry, RouteTurn::kPassesOn, "chooses the backend by dtype, layout and device");
  keys_ = DispatchKeySet{*backend};
  if (hasTensors()) {
    keys_ = (keys_ | keysAtStart()) & below(key);
  }
}

std::optional<DispatchKey> RouteWalk::selectedBackend() const {
  const auto argument = [this](const char* name) -> const c10::IValue* {
    const int position = findArgument(op_.schema(), name);
    return position < 0 ? nullptr : &arguments_.at(toSize(position));
  };
  const c10::IValue* dtype = argument("dtype");
  const c10::IValue* layout = argument("layout");
  const c10::IValue* device = argument("device");
  if (dtype == nullptr || layout == nullptr || device == nullptr) {
    return std::nullopt;
  }
  return c10::computeDispatchKey(dtype->toOptional<c10::ScalarType>(), layout->toOptional<c10::Layout>(),
                                 device->toOptional<c10::Device>());
}

bool RouteWalk::hasTensors() const {
  bool has_tensors = false;
  forEachTensor(arguments_, arguments_.size(), [&](const at::Tensor& /*tensor*/) { has_tensors = true; });
  return has_tensors;
}

}  // namespace

std::vector<RouteStep> routeOf(const OperatorHandle& op, const Stack& arguments) {
  return RouteWalk{op, arguments}.run();
}

const char* toString(RouteTurn turn) noexcept {
  static constexpr std::array<const char*, 7> kTexts{"skipped",  "passes on",    "starts over", "decomposes",
                                                     "computes", "calls Python", "raises"};
  return kTexts[static_cast<std::size_t>(turn)];
}

}  // namespace torchext
