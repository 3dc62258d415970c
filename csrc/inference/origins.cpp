#include "origins.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "../deferred_init/source_trace.h"
#include "../fake/op_traits.h"
#include "../interpreter_lock.h"
#include "../stack_utils.h"
#include "open_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::TensorImpl;
using torch::jit::Stack;

namespace {

const DispatchKeySet kBelowOrigins{DispatchKeySet::FULL_AFTER, kOriginsKey};

std::atomic<bool> are_blocks_traced{false};
std::atomic<NoteRaiser> note_raiser{nullptr};

// A line of the program, as tensors carry it. A copy of a TensorImpl that shares its data takes it along.
struct Origin final : c10::BackendMeta {
  explicit Origin(std::string where) : line{std::move(where)} {}

  const std::string line;
};

using OriginPtr = c10::intrusive_ptr<c10::BackendMeta>;

std::mutex& originsMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// The one mark of each line. Leaked, since tensors may live until the process ends.
OriginPtr originAt(const std::string& line) {
  static auto* origins = new std::unordered_map<std::string, OriginPtr>;
  const InterpreterAwareLock<std::mutex> lock(originsMutex());
  OriginPtr& origin = (*origins)[line];
  if (origin == nullptr) {
    origin = c10::make_intrusive<Origin>(line);
  }
  return origin;
}

const Origin* markOf(const TensorImpl& impl) {
  return dynamic_cast<const Origin*>(impl.get_backend_meta_intrusive_ptr().get());
}

void mark(TensorImpl& impl, OriginPtr origin) {
  if (impl.get_backend_meta() != nullptr && markOf(impl) == nullptr) {
    return;  // is a backend's
  }
  impl.set_backend_meta(std::move(origin));
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = keys.add(kOriginsKey);
}

bool isAboutInferenceTensors(const c10::Error& error) {
  // Subclasses are about something else, and are to stay what they are.
  return typeid(error) == typeid(c10::Error) &&
         std::string{error.what_without_backtrace()}.find("nference tensor") != std::string::npos;
}

// Handles one call.
class OriginsCall {
 public:
  OriginsCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack) : op_{op}, keys_{keys}, stack_{stack} {}

  void run();

 private:
  struct Argument {
    const TensorImpl* impl;
    const c10::StorageImpl* storage;
    OriginPtr origin;  // or null
  };

  void lookAtArguments();
  void call();
  std::string note() const;
  void markResults();
  void markAliases();

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  c10::SmallVector<Argument, 4> arguments_;
};

void OriginsCall::run() {
  lookAtArguments();
  call();
  if (c10::impl::tls_is_dispatch_key_included(kOriginsKey)) {
    markResults();
  } else {
    markAliases();
  }
}

void OriginsCall::lookAtArguments() {
  forEachTensor(stack_, op_.schema().arguments().size(), [this](const Tensor& tensor) {
    const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    arguments_.push_back({&impl, tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr,
                          markOf(impl) == nullptr ? nullptr : impl.get_backend_meta_intrusive_ptr()});
  });
}

// What kernels call is not met again: its errors come by here, and what it allocates is not seen by the program.
void OriginsCall::call() {
  const c10::impl::ExcludeDispatchKeyGuard guard{kOriginsKey};
  try {
    op_.redispatchBoxed(keys_ & kBelowOrigins, &stack_);
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
    const auto* origin = dynamic_cast<const Origin*>(argument.origin.get());
    if (origin != nullptr && lines.find("\n  " + origin->line) == std::string::npos) {
      lines += "\n  " + origin->line;
    }
  }
  return lines.empty() ? lines
                       : c10::str("The inference tensors among the arguments of `", op_.operator_name(),
                                  "` were created at", lines);
}

// A result that is an argument is as old as that; but `torch.tensor()` hands its result over as one.
void OriginsCall::markResults() {
  const bool is_lifted = isLiftFresh(op_);
  OriginPtr here;
  forEachTensor(stack_, op_.schema().returns().size(), [&](const Tensor& result) {
    TensorImpl& impl = *result.unsafeGetTensorImpl();
    const bool is_argument = std::any_of(arguments_.begin(), arguments_.end(),
                                         [&impl](const Argument& argument) { return argument.impl == &impl; });
    const bool is_new = !is_argument || (is_lifted && markOf(impl) == nullptr);
    if (!is_new || !impl.is_inference()) {
      return;
    }
    if (here == nullptr) {
      here = originAt(sourceHere());
    }
    mark(impl, here);
  });
}

// Nobody traces, so only views, which carry the key of their base, are marked, and as their base is.
void OriginsCall::markAliases() {
  forEachTensor(stack_, op_.schema().returns().size(), [this](const Tensor& result) {
    TensorImpl& impl = *result.unsafeGetTensorImpl();
    if (!impl.key_set().has(kOriginsKey) || markOf(impl) != nullptr || !result.has_storage()) {
      return;
    }
    const auto* storage = result.storage().unsafeGetStorageImpl();
    const auto base = std::find_if(arguments_.begin(), arguments_.end(), [storage](const Argument& argument) {
      return argument.storage == storage && argument.origin != nullptr;
    });
    if (base != arguments_.end()) {
      mark(impl, base->origin);
    }
  });
}

}  // namespace

std::string originOf(const at::TensorBase& tensor) {
  const Origin* origin = tensor.defined() ? markOf(*tensor.unsafeGetTensorImpl()) : nullptr;
  return origin == nullptr ? std::string{} : origin->line;
}

void forgetOrigin(TensorImpl& impl) {
  if (markOf(impl) != nullptr) {
    impl.set_backend_meta(nullptr);
  }
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = keys.remove(kOriginsKey);
}

void traceOriginsHere() {
  c10::impl::tls_set_dispatch_key_included(kOriginsKey, true);
}

void traceOriginsInBlocks(bool enabled) {
  are_blocks_traced = enabled;
}

bool areBlocksTraced() noexcept {
  return are_blocks_traced.load(std::memory_order_relaxed);
}

void lockOrigins() {
  originsMutex().lock();
}

void unlockOrigins() {
  originsMutex().unlock();
}

void setNoteRaiser(NoteRaiser raiser) {
  note_raiser = raiser;
}

void originsFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  OriginsCall{op, keys, *stack}.run();
}

}  // namespace torchext
