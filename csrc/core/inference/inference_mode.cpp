#include "inference_mode.h"

#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/clone.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torchext/inference_mode.h>

#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/sizes.h"
#include "../fake/fake.h"
#include "../fake/storage/fake_storage.h"
#include "../fake/storage/fake_tensor_impl.h"
#include "../hooks/hooks.h"
#include "../torch_internals/open_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::AutogradState;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;
using c10::impl::LocalDispatchKeySet;

namespace {

struct OpenBlock {
  BlockOwner owner;
  ThreadMode previous;
};

using OpenBlocks = std::vector<OpenBlock>;

// The innermost block is the last.
OpenBlocks& openBlocks() {
  thread_local OpenBlocks blocks;
  return blocks;
}

// Removes `block`. The next inner block inherits the state that `block` would restore.
void leave(OpenBlocks& blocks, OpenBlocks::iterator block) {
  const auto next = std::next(block);
  if (next == blocks.end()) {
    block->previous.makeCurrent();
  } else {
    next->previous = std::move(block->previous);
  }
  blocks.erase(block);
}

}  // namespace

void enterModeBlock(BlockOwner owner, ModeBlock kind) {
  OpenBlocks& blocks = openBlocks();
  blocks.push_back({owner, ThreadMode::current()});
  const ThreadMode& current = blocks.back().previous;
  const bool is_inference = kind == ModeBlock::kInference;
  (kind == ModeBlock::kNormalTensors ? current.normalTensors() : current.inference(is_inference)).makeCurrent();
}

void leaveModeBlock(BlockOwner owner) {
  OpenBlocks& blocks = openBlocks();
  const auto block = innermostOf(blocks, owner);
  TORCH_CHECK(
      block != blocks.end(),
      "Cannot leave a block of inference_mode() or normal_tensors() that is not open on this thread. Leave each block "
      "once, on the thread that entered it. Close a generator that holds one on the same thread.");
  const bool is_innermost = std::next(block) == blocks.end();
  leave(blocks, block);
  TORCH_CHECK(
      is_innermost,
      "A block of inference_mode() or normal_tensors() was left while a block that was entered later on this thread "
      "is still open and stays in effect. Coroutines must not hold such blocks across `await`: decorate the "
      "`async def` with inference_mode instead.");
}

bool isModeBlockOpen() noexcept {
  return !openBlocks().empty();
}

void abandonModeBlocks(BlockOwner owner) {
  OpenBlocks& blocks = openBlocks();
  for (auto block = innermostOf(blocks, owner); block != blocks.end(); block = innermostOf(blocks, owner)) {
    leave(blocks, block);
  }
}

namespace {

const DispatchKeySet kTracking{DispatchKey::ADInplaceOrView};

// `ADInplaceOrView` is never excluded: the key of normal tensors must stay enabled.
LocalDispatchKeySet inferenceKeys(LocalDispatchKeySet keys, bool enabled) {
  keys.included_ = enabled ? keys.included_ - kTracking : keys.included_ | kTracking;
  keys.excluded_ =
      enabled ? keys.excluded_ | c10::autograd_dispatch_keyset : keys.excluded_ - c10::autograd_dispatch_keyset;
  return keys;
}

}  // namespace

ThreadMode ThreadMode::current() {
  return {AutogradState::get_tls_state(), c10::impl::tls_local_dispatch_key_set(), hooks().guards.tracesOrigins()};
}

// Makes a new AutogradState instead of a changed copy: inside c10::InferenceMode, the flags beyond these four have
// their defaults.
ThreadMode ThreadMode::inference(bool enabled) const {
  return {AutogradState{/*grad_mode=*/!enabled, /*inference_mode=*/enabled, /*fw_grad_mode=*/!enabled,
                        /*multithreading_enabled=*/!enabled},
          inferenceKeys(keys, enabled), is_tracing};
}

ThreadMode ThreadMode::normalTensors() const {
  ThreadMode mode = autograd.get_inference_mode() ? inference(false) : *this;
  mode.autograd.set_grad_mode(false);
  return mode;
}

void ThreadMode::makeCurrent() const {
  AutogradState::set_tls_state(autograd);
  hooks().guards.traceOrigins(is_tracing);
  LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  now.included_ = (now.included_ - kTracking) | (keys.included_ & kTracking);
  now.excluded_ = (now.excluded_ - c10::autograd_dispatch_keyset) | (keys.excluded_ & c10::autograd_dispatch_keyset);
  c10::impl::_force_tls_local_dispatch_key_set(now);
}

struct InferenceMode::State {
  ThreadMode mode = ThreadMode::current();
};

InferenceMode::InferenceMode(bool enabled) : previous_{std::make_unique<State>()} {
  previous_->mode.inference(enabled).makeCurrent();
}

InferenceMode::~InferenceMode() {
  previous_->mode.makeCurrent();
}

bool InferenceMode::is_enabled() {
  return AutogradState::get_tls_state().get_inference_mode();
}

struct NormalTensors::State {
  ThreadMode mode = ThreadMode::current();
};

NormalTensors::NormalTensors() : previous_{std::make_unique<State>()} {
  previous_->mode.normalTensors().makeCurrent();
}

NormalTensors::~NormalTensors() {
  previous_->mode.makeCurrent();
}

std::vector<std::string> check_dispatch_state() {
  const ThreadMode mode = ThreadMode::current();
  const auto& [included, excluded] = mode.keys;
  // Autograd counts as excluded if all of its keys are; the key of a single backend may be excluded separately.
  const bool autograd_excluded = (c10::autograd_dispatch_keyset - excluded).empty();
  const bool autograd_included = included.has_any(c10::autograd_dispatch_keyset);
  const bool tracking_included = included.has(DispatchKey::ADInplaceOrView);
  const bool tracking_excluded = excluded.has(DispatchKey::ADInplaceOrView);
  const bool is_inference = mode.autograd.get_inference_mode();
  std::vector<std::string> illegal;
  const auto report = [&illegal](bool found, const char* sentence) {
    if (found) {
      illegal.emplace_back(sentence);
    }
  };
  report(
      !tracking_included && !autograd_excluded,
      "`ADInplaceOrView` is not included although `Autograd` is not excluded: inference tensors can be changed outside "
      "inference mode.");
  report(tracking_excluded && !autograd_excluded,
         "`ADInplaceOrView` is excluded although `Autograd` is not: views and versions of tensors that autograd saves "
         "are not tracked.");
  report(autograd_included, "An `Autograd` key is included: autograd also runs for inference tensors.");
  report(is_inference && !autograd_excluded,
         "Inference mode is on, but `Autograd` is not excluded: normal tensors record gradients.");
  report(
      is_inference && tracking_included,
      "Inference mode is on, but `ADInplaceOrView` is included: views and versions of inference tensors are tracked.");
  report(is_inference && mode.autograd.get_grad_mode(),
         "Inference mode is on, and so is grad mode: code that only checks grad mode assumes that gradients are "
         "recorded.");
  report(!is_inference && !tracking_included && autograd_excluded,
         "The keys are those of inference mode, but inference mode is off: new tensors are normal, and their versions "
         "are not counted.");
  return illegal;
}

// NOTE [Converting to normal tensors]
//
// An inference tensor lacks two keys and a version counter. Adding them makes it a normal tensor in place: all
// references to the TensorImpl see the change, and the Python object, its class, `requires_grad` and hooks stay. The
// no-aliasing invariant of the RFC must hold: a tensor that autograd may save must not share memory with an inference
// tensor, whose changes are not counted. So tensors that share memory and become normal together share one version
// counter. If other tensors also use the memory, they move to a copy of it.

namespace {

// Repeats the part of TensorImpl's constructor that inference mode skips.
void giveAutograd(TensorImpl& impl, const c10::VariableVersion& version) {
  hooks().guards.onNormalTensor(impl);
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = keys | c10::getAutogradRelatedKeySetFromBackend(keys.highestBackendKey());
  impl.set_version_counter(version);
}

// Returns the whole of `storage` as a tensor of bytes.
Tensor asBytes(const Storage& storage) {
  return isFakeStorage(storage) ? bytesOfStorage(storage)
                                : makeStridedTensor(storage, c10::kByte, {toSigned(storage.nbytes())}, {1}, 0, {});
}

// A Python subclass that wraps other tensors reports a storage size, but has no memory.
bool hasMemory(const Storage& storage) {
  return isFakeStorage(storage) ||
         (storage.nbytes() != 0 && storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr);
}

// The inference tensors among the given tensors and the members of sparse ones, grouped by storage.
class InferenceTensors {
 public:
  void add(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_inference() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    if (hooks().layouts.isSparse(tensor)) {
      for (const Tensor& member : hooks().layouts.membersOf(tensor)) {
        add(member);
      }
      without_storage_.push_back(tensor);
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(),
                                "to_normal() takes strided and sparse tensors, but one has the "
                                "layout ",
                                tensor.layout(),
                                ". Make a normal tensor of it with `clone()` outside "
                                "inference mode.");
    by_storage_[tensor.storage().unsafeGetStorageImpl()].push_back(tensor);
  }

  void makeNormal() {
    for (const Tensor& tensor : without_storage_) {
      giveAutograd(*tensor.unsafeGetTensorImpl(), c10::VariableVersion{0});
    }
    for (const auto& [impl, tensors] : by_storage_) {
      becomeNormalTogether(tensors.front().storage(), tensors);
    }
  }

 private:
  void becomeNormalTogether(const Storage& storage, const std::vector<Tensor>& tensors) const {
    const bool is_theirs_alone = storage.use_count() <= tensors.size();
    const Storage own = is_theirs_alone || !hasMemory(storage) ? storage : asBytes(storage).clone().storage();
    const c10::VariableVersion version{0};
    for (const Tensor& tensor : tensors) {
      TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!isSameStorage(own, impl.storage())) {
        FakeTensorImpl::moveTo(impl, own);
      }
      giveAutograd(impl, version);
    }
  }

  std::unordered_set<const TensorImpl*> seen_;
  std::vector<Tensor> without_storage_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Tensor>> by_storage_;
};

}  // namespace

void makeNormal(at::ArrayRef<Tensor> tensors) {
  const NormalTensors guard;
  InferenceTensors inference;
  for (const Tensor& tensor : tensors) {
    inference.add(tensor);
  }
  inference.makeNormal();
}

}  // namespace torchext
