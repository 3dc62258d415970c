#include "origins.h"

#include <algorithm>
#include <atomic>
#include <typeinfo>

#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/error_texts.h"
#include "../../libraries/support/interpreter.h"
#include "../../libraries/support/stack_utils.h"
#include "tensor_marks.h"

namespace torchext {

using c10::TensorImpl;

namespace {

std::atomic<bool> are_blocks_traced{false};

bool isTracing() noexcept {
  return isMarksKeyDemanded(MarksFeature::kOrigins);
}

void setTracing(bool is_tracing) noexcept {
  setMarksKeyDemanded(MarksFeature::kOrigins, is_tracing);
}

// Subclasses of c10::Error have other causes, and keep their type.
bool needsOrigins(const c10::Error& error) {
  return typeid(error) == typeid(c10::Error) && isAboutInferenceTensors(error);
}

// A thread traces within a mode. The end of a mode of PyTorch is not reported, so it is detected here.
void dropEndedModes() {
  if (isTracing() && !c10::InferenceMode::is_enabled() && !isModeBlockOpen()) {
    setTracing(false);
  }
}

// Handles one call on a thread that traces, or with arguments that have an origin.
class OriginsCall {
 public:
  explicit OriginsCall(MarkedCall& call) : call_{call}, op_{call.op()}, stack_{call.stack()} {}

  void run();

 private:
  struct Argument {
    const TensorImpl* impl;
    const c10::StorageImpl* storage;
    std::string origin;  // may be empty
  };

  void inspectArguments();
  void passOn();
  std::string note() const;
  void markResults();
  void markAliases();

  MarkedCall& call_;
  const OperatorHandle& op_;
  Stack& stack_;
  c10::SmallVector<Argument, 4> arguments_;
};

void OriginsCall::run() {
  inspectArguments();
  passOn();
  if (isTracing()) {
    markResults();
  } else {
    markAliases();
  }
}

void OriginsCall::inspectArguments() {
  forEachTensor(argumentsOf(op_, stack_), [this](const Tensor& tensor) {
    const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    arguments_.push_back(
        {&impl, tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr, originMarkOf(impl)});
  });
}

// Calls inside kernels do not come here: their errors pass through this call, and their temporary tensors are not
// visible to the program.
void OriginsCall::passOn() {
  try {
    call_.passOn();
  } catch (c10::Error& error) {
    if (!needsOrigins(error)) {
      throw;
    }
    const std::string text = note();
    if (text.empty()) {
      throw;
    }
    interpreter().raiseWithNote(error, text);
    error.add_context(text);
    throw;
  }
}

std::string OriginsCall::note() const {
  std::string lines;
  for (const Argument& argument : arguments_) {
    if (!argument.origin.empty() && lines.find("\n  " + argument.origin) == std::string::npos) {
      lines += "\n  " + argument.origin;
    }
  }
  return lines.empty() ? lines
                       : c10::str("The inference tensors among the arguments of `", op_.operator_name(),
                                  "` were created at", lines);
}

// A result that is an argument keeps its origin, except that `torch.tensor()` passes its new result as an argument.
void OriginsCall::markResults() {
  const bool is_lifted = isLiftFresh(op_);
  std::string here;
  forEachTensor(topOf(stack_, op_.schema().returns().size()), [&](const Tensor& result) {
    TensorImpl& impl = *result.unsafeGetTensorImpl();
    const bool is_argument = std::any_of(arguments_.begin(), arguments_.end(),
                                         [&impl](const Argument& argument) { return argument.impl == &impl; });
    const bool is_new = !is_argument || (is_lifted && originMarkOf(impl).empty());
    if (!is_new || !impl.is_inference()) {
      return;
    }
    if (here.empty()) {
      here = interpreter().sourceLineHere();
    }
    setOriginMark(impl, here);
  });
}

// The thread does not trace, so only views are marked, like their base. Some views lack the key of their base: the view
// of an AmpTensor in another dtype has just lost it.
void OriginsCall::markAliases() {
  forEachTensor(topOf(stack_, op_.schema().returns().size()), [this](const Tensor& result) {
    TensorImpl& impl = *result.unsafeGetTensorImpl();
    if (!impl.is_inference() || !originMarkOf(impl).empty() || !result.has_storage()) {
      return;
    }
    const auto* storage = result.storage().unsafeGetStorageImpl();
    const auto base = std::find_if(arguments_.begin(), arguments_.end(), [storage](const Argument& argument) {
      return argument.storage == storage && !argument.origin.empty();
    });
    if (base != arguments_.end()) {
      setOriginMark(impl, base->origin);
    }
  });
}

}  // namespace

void handleOrigins(MarkedCall& call) {
  dropEndedModes();
  OriginsCall{call}.run();
}

std::string originOf(const at::TensorBase& tensor) {
  return tensor.defined() ? originMarkOf(*tensor.unsafeGetTensorImpl()) : std::string{};
}

void enterTracedBlock(BlockOwner owner, ModeBlock kind, bool is_traced) {
  if (is_traced) {
    takeMarksKey();
  }
  enterModeBlock(owner, kind);
  if (is_traced || are_blocks_traced.load(std::memory_order_relaxed)) {
    traceOriginsHere();
  }
}

void traceOriginsHere() {
  takeMarksKey();
  setTracing(true);
}

void traceOriginsInBlocks(bool enabled) {
  if (enabled) {
    takeMarksKey();
  }
  are_blocks_traced = enabled;
}

void registerOrigins() {
  hooks().guards.onNormalTensor = [](TensorImpl& tensor) { setOriginMark(tensor, {}); };
}

}  // namespace torchext
