#include "amp_tensor.h"

#include <algorithm>
#include <atomic>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/Type.h>
#include <c10/util/irange.h>

#include "../../core/amp/region.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/autograd.h"
#include "policies.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

void checkCanBeWrapped(const at::TensorBase& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (canBeMarked(impl)) {
    return;
  }
  const c10::BackendMeta& metadata = *impl.get_backend_meta();
  TORCH_CHECK(false, "to_amp() cannot mark a tensor of shape ", tensor.sizes(), " on the device ", tensor.device(),
              ": its backend metadata (`c10::BackendMeta`) is already a `", c10::demangle(typeid(metadata).name()),
              "`. Wrap a copy without such metadata, or use `torchext.amp.autocast()`, which does not mark tensors.");
}

namespace {

// ---- Backward passes ----

// Process-wide, for threads of the autograd engine, which have no reference to their pass.
std::atomic<int> passes_that_create_graphs{0};

// The innermost state. A thread of the autograd engine has none for its part of a pass.
thread_local std::optional<BackwardState> current;

// Returns true if the running code is not a formula of derivatives.yaml. Call it only in a backward pass. Hooks belong
// to the function that they precede or follow.
bool isInUsersBackward() {
  return !isRunningPyTorchsNode();
}

// The engine enables grad mode only for a pass that creates a graph.
bool isRecomputingByHand() {
  const bool creates_graph = current ? current->creates_graph : passes_that_create_graphs > 0;
  return c10::GradMode::is_enabled() && !creates_graph && isInUsersBackward();
}

// Returns true if this thread runs a backward pass, and not a recomputation.
bool isInBackward() {
  return isRunningBackward() && !(current && current->is_recomputation) && !isRecomputingByHand();
}

// ---- Arguments and results of a call ----

// Autocast never casts double, and float32 is clean.
bool isLower(const Tensor& tensor) {
  return tensor.is_floating_point() && tensor.scalar_type() != at::kDouble && tensor.scalar_type() != at::kFloat;
}

bool isWrapped(const Tensor& tensor) {
  return isAmp(tensor) && !isToBeCleaned(tensor);
}

// Returns true if operators autocast for the device of `tensor` here, or around the compiled code that runs here.
bool isAutocastingFor(const Tensor& tensor) {
  const c10::DeviceType device_type = tensor.device().type();
  return autocast::is_autocast_available(device_type) &&
         (autocast::is_autocast_enabled(device_type) || isAutocastingAroundCompiledCode(device_type));
}

// Returns true if `tensor` is marked to be cleaned, is not in float32, and operators do not autocast for it.
bool isUnclean(const Tensor& tensor) {
  return isToBeCleaned(tensor) && isLower(tensor) && !isAutocastingFor(tensor);
}

// Returns true if `op` applies one operator to each element of its lists, which have the same length.
bool isElementwise(const OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const auto& arguments = op.schema().arguments();
  const auto is_named = [&name](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  const auto is_list = [](const c10::Argument& argument) {
    return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  return (is_named("aten::_foreach_") || is_named("aten::_fused_") || is_named("aten::_amp_foreach_")) &&
         std::any_of(arguments.begin(), arguments.end(), is_list);
}

// By element. A tensor outside of lists belongs to all elements.
std::vector<bool> wrappedElements(c10::ArrayRef<IValue> arguments) {
  const auto* const list =
      std::find_if(arguments.begin(), arguments.end(), [](const IValue& argument) { return argument.isTensorList(); });
  std::vector<bool> elements(list->toListRef().size());
  for (const IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && isWrapped(argument.toTensor())) {
      return std::vector<bool>(elements.size(), true);
    }
    std::size_t i = 0;
    if (argument.isTensorList()) {
      forEachTensor(argument, [&](const Tensor& tensor) {
        if (i < elements.size()) {
          elements[i] = elements[i] || isWrapped(tensor);
        }
        ++i;
      });
    }
  }
  return elements;
}

// The properties of the arguments of a call that decide its handling.
struct AmpArguments {
  AmpArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // All tensors, and those that the call writes. For operators on lists, only tensors in lists.
  c10::SmallVector<at::Tensor, 4> all;
  c10::SmallVector<at::Tensor, 2> written;
  // Whether any of them is wrapped, and the autocast keys for the devices of the wrapped ones.
  bool has_wrapped = false;
  c10::DispatchKeySet autocast_keys;
  // For operators that apply to each element of lists (`_foreach_add_`, `_fused_adam_`): whether element i involves a
  // wrapped tensor. Empty for all other operators, and if no tensor is wrapped.
  std::vector<bool> has_wrapped_at;
  // The dtype of a tensor for which isUnclean() holds, or Undefined.
  at::ScalarType unclean = at::ScalarType::Undefined;
  // The storages of tensors that will be cleaned, by this call or a later one.
  c10::SmallVector<const c10::StorageImpl*, 2> to_be_cleaned;
  // Whether they have different dtypes among those that autocast casts.
  bool is_mixture = false;

 private:
  void inspectTensor(const at::Tensor& tensor);
};

AmpArguments::AmpArguments(const OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema().arguments();
  const bool is_elementwise = isElementwise(op);
  for (const auto i : c10::irange(schema.size())) {
    const bool is_written = isWritten(schema[i]);
    const IValue& argument = torch::jit::peek(stack, i, schema.size());
    forEachTensor(argument, [&](const Tensor& tensor) {
      inspectTensor(tensor);
      all.push_back(tensor);
      // Written tensors outside of the lists concern all elements, for example GradScaler's flag for infinities.
      if (is_written && !(is_elementwise && argument.isTensor())) {
        written.push_back(tensor);
      }
    });
  }
  if (has_wrapped && is_elementwise) {
    has_wrapped_at = wrappedElements(topOf(stack, schema.size()));
  }
}

void AmpArguments::inspectTensor(const Tensor& tensor) {
  const auto is_castable = [](const Tensor& x) { return isLower(x) || x.scalar_type() == at::kFloat; };
  const auto* const other = std::find_if(all.begin(), all.end(), is_castable);
  is_mixture =
      is_mixture || (is_castable(tensor) && other != all.end() && other->scalar_type() != tensor.scalar_type());
  if (isWrapped(tensor)) {
    has_wrapped = true;
    if (autocast::is_autocast_available(tensor.device().type())) {
      autocast_keys = autocast_keys.add(autocast::get_autocast_dispatch_key_from_device_type(tensor.device().type()));
    }
  }
  if (isToBeCleaned(tensor) && tensor.has_storage()) {
    to_be_cleaned.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  if (isUnclean(tensor)) {
    unclean = tensor.scalar_type();
  }
}

void forEachResult(const OperatorHandle& op, const Stack& stack, TensorVisitor visit) {
  forEachTensor(topOf(stack, op.schema().returns().size()), visit);
}

// Operators without any work return an argument itself, for example `broadcast_tensors` (called by losses) for tensors
// of equal shape.
bool isArgument(const AmpArguments& arguments, const Tensor& result) {
  return std::any_of(arguments.all.begin(), arguments.all.end(),
                     [&result](const Tensor& argument) { return argument.is_same(result); });
}

// Excludes views of existing memory and written arguments, which keep their mark.
bool isNew(const AmpArguments& arguments, const Tensor& result) {
  return std::none_of(arguments.all.begin(), arguments.all.end(), [&result](const Tensor& argument) {
    return argument.is_same(result) ||
           (argument.has_storage() && result.has_storage() && isSameStorage(argument.storage(), result.storage()));
  });
}

// View kernels copy the key of marks, but not the mark. A result with the key is not always such a view: a view of a
// tensor with an origin need not be an AmpTensor (`traced.view_as(to_be_cleaned)`).
bool isViewOfToBeCleaned(const AmpArguments& arguments, const Tensor& result) {
  const auto& storages = arguments.to_be_cleaned;
  return result.key_set().has(kMarksKey) && result.has_storage() &&
         std::find(storages.begin(), storages.end(), result.storage().unsafeGetStorageImpl()) != storages.end();
}

// For an operator on lists, considers only the arguments of the given element.
bool meetsWrapped(const AmpArguments& arguments, std::size_t element) {
  const auto& elements = arguments.has_wrapped_at;
  return elements.empty() ? arguments.has_wrapped : elements[element % elements.size()];
}

void markResult(const AmpArguments& arguments, const Tensor& result, std::size_t element) {
  if (isArgument(arguments, result)) {
    return;
  }
  if (!canBeAmp(result)) {
    makeOrdinary(result);  // a view of an AmpTensor in another dtype
  } else if (meetsWrapped(arguments, element)) {
    makeAmp(result);
  } else if (isViewOfToBeCleaned(arguments, result)) {
    markToBeCleaned(result);
  }
}

// A written tensor that is not wrapped stays ordinary. So an unwrapped model stays unwrapped when an optimizer writes
// state made from wrapped parameters into it, when it averages wrapped models, or when it loads their state.
// Collectives are different: they move whole tensors into memory that replaces them, and FSDP makes the parameters of a
// module from it.
bool isMovingTensors(const OperatorHandle& op) {
  const std::string_view name_space = namespaceOf(op.operator_name());
  return name_space == "c10d" || name_space == "_c10d_functional" || name_space == "fsdp";
}

// Marks the results of a call as wrapped, to be cleaned, or neither, by its arguments. Arguments keep their marks, also
// written ones, unless a collective or FSDP moved wrapped tensors into them.
void markResults(const OperatorHandle& op, const Stack& stack, const AmpArguments& arguments) {
  std::size_t element = 0;
  forEachResult(op, stack, [&](const Tensor& result) { markResult(arguments, result, element++); });
  if (isMovingTensors(op)) {
    element = 0;
    for (const Tensor& written : arguments.written) {
      if (meetsWrapped(arguments, element++) && canBeAmp(written)) {
        makeAmp(written);
      }
    }
  }
}

// The same for a call that neither autocasts AmpTensors nor cleans: results in a self-cleaning region are marked to be
// cleaned.
void markResultsOfOthers(const OperatorHandle& op, const Stack& stack, const AmpArguments& arguments) {
  markResults(op, stack, arguments);
  if (arguments.has_wrapped) {
    return;
  }
  const bool is_inside = isInSelfCleaningRegion();
  forEachResult(op, stack, [&](const Tensor& result) {
    const bool is_made_inside = is_inside && canBeAmp(result) && isAutocastingFor(result);
    // If a view operator copies, its result will be cleaned like its argument, unless the caller requested another
    // dtype. Views of other arguments keep the state of these (`ordinary.view_as(to_be_cleaned)`).
    const bool is_like_unclean =
        arguments.unclean != at::ScalarType::Undefined && !isAmp(result) && result.scalar_type() == arguments.unclean;
    if ((is_made_inside || is_like_unclean) && isNew(arguments, result)) {
      markToBeCleaned(result);
    }
  });
}

// ---- The handler ----

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
          op_.schema().arguments()[0].type()->kind() == c10::TypeKind::TensorType &&
          namespaceOf(op_.operator_name()) == "aten");
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
  inspectProbedCall(call.op(), call.stack());
  AmpCall{call.op(), call.stack()}.run(call);
}

}  // namespace

BackwardGuard::BackwardGuard(bool is_recomputation, bool has_region_decided, bool creates_graph)
    : previous_{
          std::exchange(current, BackwardState{is_recomputation, has_region_decided, creates_graph, regionDepth()})} {
  passes_that_create_graphs += creates_graph ? 1 : 0;
}

BackwardGuard::~BackwardGuard() {
  passes_that_create_graphs -= current->creates_graph ? 1 : 0;
  current = previous_;
}

bool isRegionDeciding() noexcept {
  return current ? current->has_region_decided || regionDepth() > current->depth : regionDepth() > 0;
}

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
