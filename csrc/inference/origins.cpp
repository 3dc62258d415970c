#include "origins.h"

#include <algorithm>
#include <atomic>
#include <typeinfo>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "../amp/policy_probe.h"
#include "../amp/region.h"
#include "../fake/calls/op_traits.h"
#include "../marks/source_trace.h"
#include "../marks/tensor_marks.h"
#include "../stack_utils.h"
#include "mode_blocks.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::TensorImpl;
using torch::jit::Stack;

namespace {

std::atomic<bool> are_blocks_traced{false};
std::atomic<NoteRaiser> note_raiser{nullptr};

bool isAboutInferenceTensors(const c10::Error& error) {
  // Subclasses are about something else, and are to stay what they are.
  return typeid(error) == typeid(c10::Error) &&
         std::string{error.what_without_backtrace()}.find("nference tensor") != std::string::npos;
}

// Handles one call.
class OriginsCall {
 public:
  OriginsCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack, MarkedCall below)
      : op_{op}, keys_{keys}, stack_{stack}, below_{below} {}

  void run();

 private:
  struct Argument {
    const TensorImpl* impl;
    const c10::StorageImpl* storage;
    std::string origin;  // or empty
  };

  void lookAtArguments();
  void call();
  std::string note() const;
  void markResults();
  void markAliases();

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const MarkedCall below_;
  c10::SmallVector<Argument, 4> arguments_;
};

void OriginsCall::run() {
  lookAtArguments();
  call();
  if (isTracingOrigins()) {
    markResults();
  } else {
    markAliases();
  }
}

void OriginsCall::lookAtArguments() {
  forEachTensor(stack_, op_.schema().arguments().size(), [this](const Tensor& tensor) {
    const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    arguments_.push_back(
        {&impl, tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr, originMarkOf(impl)});
  });
}

// What kernels call is not met again: its errors come by here, and what it allocates is not seen by the program.
void OriginsCall::call() {
  try {
    below_(op_, keys_, &stack_);
  } catch (c10::Error& error) {
    if (!isAboutInferenceTensors(error)) {
      throw;
    }
    const std::string text = note();
    if (text.empty()) {
      throw;
    }
    if (const NoteRaiser raise = note_raiser) {
      raise(error, text);
    }
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

// A result that is an argument is as old as that; but `torch.tensor()` hands its result over as one.
void OriginsCall::markResults() {
  const bool is_lifted = isLiftFresh(op_);
  std::string here;
  forEachTensor(stack_, op_.schema().returns().size(), [&](const Tensor& result) {
    TensorImpl& impl = *result.unsafeGetTensorImpl();
    const bool is_argument = std::any_of(arguments_.begin(), arguments_.end(),
                                         [&impl](const Argument& argument) { return argument.impl == &impl; });
    const bool is_new = !is_argument || (is_lifted && originMarkOf(impl).empty());
    if (!is_new || !impl.is_inference()) {
      return;
    }
    if (here.empty()) {
      here = sourceHere();
    }
    setOriginMark(impl, here);
  });
}

// Nobody traces, so only views are marked, and as their base is. Not all have the key of their base: the view of an
// AmpTensor in another dtype has just lost it.
void OriginsCall::markAliases() {
  forEachTensor(stack_, op_.schema().returns().size(), [this](const Tensor& result) {
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

std::string originOf(const at::TensorBase& tensor) {
  return tensor.defined() ? originMarkOf(*tensor.unsafeGetTensorImpl()) : std::string{};
}

void traceOriginsHere() {
  takeMarksKey();
  c10::impl::tls_set_dispatch_key_included(kMarksKey, true);
}

bool isTracingOrigins() {
  return c10::impl::tls_is_dispatch_key_included(kMarksKey) &&
         (!(isInSelfCleaningRegion() || isAskingKernel()) || areBlocksTraced() || isTracedBlockOpen());
}

void traceOriginsInBlocks(bool enabled) {
  if (enabled) {
    takeMarksKey();
  }
  are_blocks_traced = enabled;
}

bool areBlocksTraced() noexcept {
  return are_blocks_traced.load(std::memory_order_relaxed);
}

void setNoteRaiser(NoteRaiser raiser) {
  note_raiser = raiser;
}

void originsFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, MarkedCall below) {
  OriginsCall{op, keys, *stack, below}.run();
}

}  // namespace torchext
