#include "materialize.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include <c10/util/irange.h>

#include "../fake/calls/errors.h"
#include "../fake/fake.h"
#include "../fake/storage/fake_factories.h"
#include "../fake/storage/fake_storage.h"
#include "../support/locks.h"
#include "replay/replay.h"
#include "retained.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

std::atomic<bool> gives_fakes = false;

// A fake storage to make real.
struct Pending {
  Storage fake;
  StorageValuePtr value;
  Move move;
  // The requested tensors.
  std::vector<Tensor> tensors;
};

// The fake storages of a request, in order, without duplicates.
class Request {
 public:
  void add(const Tensor& tensor, const Placement& placement);

  std::vector<Pending>& storages() noexcept {
    return storages_;
  }

 private:
  std::vector<Pending> storages_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> places_;
};

void Request::add(const Tensor& tensor, const Placement& placement) {
  if (!isFake(tensor) || (materializesAsFakes() && !isDeferred(tensor))) {
    return;
  }
  const Storage& storage = tensor.storage();
  const auto [place, is_new] = places_.try_emplace(storage.unsafeGetStorageImpl(), storages_.size());
  if (is_new) {
    StorageValuePtr value = valueOf(tensor);
    TORCH_CHECK_VALUE(
        value != nullptr, "A fake tensor of shape ", tensor.sizes(),
        " cannot be materialized: it was not constructed by deferred_init, so no operators are recorded that "
        "compute its values.");
    storages_.push_back({storage, std::move(value), {}, {}});
  }
  Pending& pending = storages_[place->second];
  pending.tensors.push_back(tensor);
  if (Move move = planMove(tensor, placement); move.isNeeded()) {
    pending.move = std::move(move);
  }
}

void checkFits(const Storage& fake, const Storage& real) {
  if (real.device() != fake.device()) {
    TORCHEXT_THROW(MaterializationError,
                   c10::str("A tensor was recorded on ", fake.device(), ", but replaying its construction put it on ",
                            real.device(),
                            ". Construct it with an explicit `device`, or materialize it where that device exists."));
  }
}

// Makes the tensors of `pending` real with `real`, which holds their recorded value.
void becomeRealWith(const Pending& pending, const Storage& real, bool retain) {
  const std::vector<Tensor> residents = retain ? residentsOf(pending.fake) : std::vector<Tensor>{};
  const auto retained = retain ? std::make_shared<Retained>(pending.fake, residents) : nullptr;
  Storage current = pending.fake;
  if (pending.move.isNeeded()) {
    current = becomeRealElsewhere(pending.fake, real, pending.move, pending.tensors);
  } else {
    becomeReal(pending.fake, real);
  }
  if (retained != nullptr) {
    Retained::attach(retained, current, residents);
  }
}

// Makes everything real in one pass over the graph, or nothing.
void materializeTogether(const std::vector<Pending>& storages, const MaterializeOptions& options) {
  std::vector<StorageValuePtr> values;
  values.reserve(storages.size());
  for (const Pending& pending : storages) {
    values.push_back(pending.value);
  }
  const std::vector<Storage> real = Replay{values, options.on_done, CacheUse::kReads}.run();
  for (const auto i : c10::irange(storages.size())) {
    checkFits(storages[i].fake, real[i]);
  }
  for (const auto i : c10::irange(storages.size())) {
    becomeRealWith(storages[i], real[i], options.retain);
  }
}

// Returns the memory of a small value, such as a counter or a table of indices, because a dry run keeps the values of
// constants that are not deferred. Returns null if the value is large, or cannot be computed here.
Storage smallValueOf(const Pending& pending) {
  constexpr std::size_t kMostKnownBytes = std::size_t{64} << 10U;
  if (pending.value->nbytes() == 0 || pending.value->nbytes() > kMostKnownBytes || pending.move.dtypes) {
    return {};
  }
  const ReplayPlan plan{{pending.value}, CacheUse::kReads};
  const bool is_possible = plan.peakOnCpu() <= 4 * kMostKnownBytes && canRun(plan);
  return is_possible ? std::move(computeValues({pending.value}, /*keep_small=*/false).front()) : Storage{};
}

void materializeAlone(const Pending& pending, bool retain) {
  const Storage real = std::move(computeValues({pending.value}, /*keep_small=*/false).front());
  checkFits(pending.fake, real);
  becomeRealWith(pending, real, retain);
}

}  // namespace

void materialize(at::ArrayRef<Tensor> tensors) {
  materialize(tensors, {}, {});
}

void materialize(at::ArrayRef<Tensor> placed, at::ArrayRef<Tensor> others, const MaterializeOptions& options) {
  const Locked lock{LockRank::kReplay};
  const Placement placement = checkedPlacement(options.placement, materializesAsFakes());
  Request request;
  for (const Tensor& tensor : placed) {
    request.add(tensor, placement);
  }
  for (const Tensor& tensor : others) {
    request.add(tensor, {});
  }
  std::vector<Pending>& storages = request.storages();
  if (materializesAsFakes()) {
    for (const Pending& pending : storages) {
      becomeFakeElsewhere(pending.fake, pending.move, pending.tensors, pending.value->isPinned(),
                          smallValueOf(pending));
      options.on_done(pending.value->nbytes());
    }
    return;
  }
  if (std::none_of(storages.begin(), storages.end(), [](const Pending& p) { return p.move.isNeeded(); })) {
    materializeTogether(storages, options);
    return;
  }
  for (Pending& pending : storages) {
    materializeAlone(pending, options.retain);
    const std::size_t nbytes = pending.value->nbytes();
    pending = {};  // may have held the last reference to the recording
    options.on_done(nbytes);
  }
}

void materializeAsFakes(bool gives) {
  gives_fakes = gives;
}

bool materializesAsFakes() noexcept {
  return gives_fakes && areFactoriesFake();
}

Tensor evaluate(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};  // it may become real on another thread, which changes its storage and geometry
  TORCH_CHECK_VALUE(valueOf(deferred) != nullptr, "Cannot evaluate: the tensor is not deferred.");
  return computeTensor(deferred);
}

ReplayNeeds needsOf(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Cannot estimate memory: the tensor is not deferred.");
  const ReplayPlan plan{{value}, CacheUse::kReads};
  return {plan.peakOnCpu(), plan.written()};
}

}  // namespace torchext
