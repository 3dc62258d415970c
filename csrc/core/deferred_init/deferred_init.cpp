#include "deferred_init.h"

#include <memory>

#include <c10/util/irange.h>
#include <torchext/deferred_init.h>

#include "../../libraries/support/included_key.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/take_key.h"
#include "../fake/calls/errors.h"
#include "../fake/fake.h"
#include "../fake/storage/fake_keys.h"
#include "../fake/storage/fake_storage.h"
#include "../hooks/hooks.h"
#include "graph/op_graph.h"
#include "record/recorder.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

std::optional<std::size_t> Request::add(const Tensor& tensor) {
  if (!isFake(tensor)) {
    return std::nullopt;
  }
  const Storage& storage = tensor.storage();
  const auto [place, is_new] = places_.try_emplace(storage.unsafeGetStorageImpl(), storages_.size());
  if (is_new) {
    StorageValuePtr value = valueOf(tensor);
    TORCH_CHECK_VALUE(
        value != nullptr, "A fake tensor of shape ", tensor.sizes(),
        " cannot be materialized: it was not constructed by deferred_init, so no operators are recorded that "
        "compute its values.");
    storages_.push_back({storage, std::move(value), {}});
  }
  storages_[place->second].tensors.push_back(tensor);
  return place->second;
}

void checkFits(const Storage& fake, const Storage& real) {
  if (real.device() != fake.device()) {
    TORCHEXT_THROW(MaterializationError,
                   c10::str("A tensor was recorded on ", fake.device(), ", but replaying its construction put it on ",
                            real.device(),
                            ". Construct it with an explicit `device`, or materialize it where that device exists."));
  }
}

void materializeTogether(const std::vector<Pending>& storages,
                         Progress on_done,
                         c10::function_ref<void(std::size_t place, const Storage& real)> become_real) {
  std::vector<StorageValuePtr> values;
  values.reserve(storages.size());
  for (const Pending& pending : storages) {
    values.push_back(pending.value);
  }
  const std::vector<Storage> real = Replay{values, on_done, CacheUse::kReads}.run();
  for (const auto i : c10::irange(storages.size())) {
    checkFits(storages[i].fake, real[i]);
  }
  for (const auto i : c10::irange(storages.size())) {
    become_real(i, real[i]);
  }
}

void materialize(at::ArrayRef<Tensor> tensors) {
  if (hooks().materialize(tensors)) {
    return;
  }
  const Locked lock{LockRank::kReplay};
  Request request;
  for (const Tensor& tensor : tensors) {
    request.add(tensor);
  }
  const std::vector<Pending>& storages = request.storages();
  materializeTogether(storages, ignoreProgress,
                      [&](std::size_t place, const Storage& real) { becomeReal(storages[place].fake, real); });
}

Tensor evaluate(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};  // it may become real on another thread, which changes its storage and geometry
  TORCH_CHECK_VALUE(valueOf(deferred) != nullptr, "Cannot evaluate: the tensor is not deferred.");
  return computeTensor(deferred);
}

namespace {

void registerDeferredInitKey() {
  registerFallback(c10::DispatchKey::DeferredInit, torch::CppFunction::makeFromBoxedFunction<&deferredInitFallback>());
  hooks().on_deferred_init_key();
  setHandlersRecorder();
}

void takeDeferredInitKey() {
  static LazyKey key{c10::DispatchKey::DeferredInit, "Deferred tensors need"};
  takeFakeKeys();
  shareFakeKernels();
  key.take(registerDeferredInitKey);
}

}  // namespace

struct DeferredInitGuard::State {
  IncludedKey include{c10::DispatchKey::DeferredInit};
};

DeferredInitGuard::DeferredInitGuard() {
  takeDeferredInitKey();
  state_ = std::make_unique<State>();
}

DeferredInitGuard::~DeferredInitGuard() = default;

bool isDeferred(const at::TensorBase& tensor) {
  return valueOf(tensor) != nullptr;
}

}  // namespace torchext
