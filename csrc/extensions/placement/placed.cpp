#include "placed.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <c10/util/irange.h>

#include "../../core/deferred_init/deferred_init.h"
#include "../../core/deferred_init/replay/replay.h"
#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/locks.h"
#include "retained.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

std::atomic<bool> gives_fakes = false;

// The fake storages of a request, and where their values go.
class PlacedRequest {
 public:
  void add(const Tensor& tensor, const Placement& placement) {
    if (materializesAsFakes() && !isDeferred(tensor)) {
      return;
    }
    const auto place = request_.add(tensor);
    moves_.resize(request_.storages().size());
    if (!place) {
      return;
    }
    if (Move move = planMove(tensor, placement); move.isNeeded()) {
      moves_[*place] = std::move(move);
    }
  }

  std::vector<Pending>& storages() noexcept {
    return request_.storages();
  }
  const std::vector<Move>& moves() const noexcept {
    return moves_;
  }
  bool moveAny() const {
    return std::any_of(moves_.begin(), moves_.end(), [](const Move& move) { return move.isNeeded(); });
  }

 private:
  Request request_;
  std::vector<Move> moves_;
};

// Makes the tensors of `pending` real with `real`, which holds their recorded value.
void becomeRealWith(const Pending& pending, const Move& move, const Storage& real, bool retain) {
  const std::vector<Tensor> residents = retain ? residentsOf(pending.fake) : std::vector<Tensor>{};
  const auto retained = retain ? std::make_shared<Retained>(pending.fake, residents) : nullptr;
  Storage current = pending.fake;
  if (move.isNeeded()) {
    current = becomeRealElsewhere(pending.fake, real, move, pending.tensors);
  } else {
    becomeReal(pending.fake, real);
  }
  if (retained != nullptr) {
    Retained::attach(retained, current, residents);
  }
}

// Returns the memory of a small value, such as a counter or a table of indices, because a dry run keeps the values of
// constants that are not deferred. Returns null if the value is large, or cannot be computed here.
Storage smallValueOf(const Pending& pending, const Move& move) {
  constexpr std::size_t kMostKnownBytes = std::size_t{64} << 10U;
  if (pending.value->nbytes() == 0 || pending.value->nbytes() > kMostKnownBytes || move.dtypes) {
    return {};
  }
  const ReplayPlan plan{{pending.value}, CacheUse::kReads};
  const bool is_possible = plan.peakOnCpu() <= 4 * kMostKnownBytes && canRun(plan);
  return is_possible ? std::move(computeValues({pending.value}, /*keep_small=*/false).front()) : Storage{};
}

void materializeAlone(const Pending& pending, const Move& move, bool retain) {
  const Storage real = std::move(computeValues({pending.value}, /*keep_small=*/false).front());
  checkFits(pending.fake, real);
  becomeRealWith(pending, move, real, retain);
}

}  // namespace

void materialize(at::ArrayRef<Tensor> placed, at::ArrayRef<Tensor> others, const MaterializeOptions& options) {
  const Locked lock{LockRank::kReplay};
  const Placement placement = checkedPlacement(options.placement, materializesAsFakes());
  PlacedRequest request;
  for (const Tensor& tensor : placed) {
    request.add(tensor, placement);
  }
  for (const Tensor& tensor : others) {
    request.add(tensor, {});
  }
  std::vector<Pending>& storages = request.storages();
  const std::vector<Move>& moves = request.moves();
  if (!materializesAsFakes() && !request.moveAny()) {
    materializeTogether(storages, options.on_done, [&](std::size_t place, const Storage& real) {
      becomeRealWith(storages[place], moves[place], real, options.retain);
    });
    return;
  }
  for (const auto i : c10::irange(storages.size())) {
    const std::size_t nbytes = storages[i].value->nbytes();
    if (materializesAsFakes()) {
      becomeFakeElsewhere(storages[i].fake, moves[i], storages[i].tensors, storages[i].value->isPinned(),
                          smallValueOf(storages[i], moves[i]));
    } else {
      materializeAlone(storages[i], moves[i], options.retain);
    }
    storages[i] = {};  // may have held the last reference to the recording
    options.on_done(nbytes);
  }
}

void materializeAsFakes(bool gives) {
  gives_fakes = gives;
}

bool materializesAsFakes() noexcept {
  return gives_fakes && areFactoriesFake();
}

ReplayNeeds needsOf(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Cannot estimate memory: the tensor is not deferred.");
  const ReplayPlan plan{{value}, CacheUse::kReads};
  return {plan.peakOnCpu(), plan.written()};
}

void registerPlacements() {
  hooks().materialize = [](at::ArrayRef<Tensor> tensors) {
    const bool as_fakes = materializesAsFakes();
    if (as_fakes) {
      materialize(tensors, {}, {});
    }
    return as_fakes;
  };
}

}  // namespace torchext
