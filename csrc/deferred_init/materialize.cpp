#include "materialize.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include <c10/util/irange.h>

#include "../fake/fake.h"
#include "../fake/fake_storage.h"
#include "../interpreter_lock.h"
#include "replay.h"

namespace torchext {

using at::Tensor;
using c10::Storage;

namespace {

// One replay at a time: replaying may fold values. Recursive, because a kernel in Python may read a deferred tensor.
using ReplayLock = InterpreterAwareLock<std::recursive_mutex>;

std::recursive_mutex& replayMutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

constexpr std::size_t kSmallBytes = std::size_t{1} << 20U;

// The fake storages among those that `tensors` show, each once, with their recorded values.
std::vector<std::pair<Storage, StorageValuePtr>> recordedStorages(at::ArrayRef<Tensor> tensors) {
  std::vector<std::pair<Storage, StorageValuePtr>> storages;
  for (const Tensor& tensor : tensors) {
    if (!isFake(tensor)) {
      continue;
    }
    StorageValuePtr value = valueOf(tensor);
    TORCH_CHECK_VALUE(value != nullptr, "A fake tensor of shape ", tensor.sizes(),
                      " cannot be materialized, because it was not constructed by deferred_init: there is no record of "
                      "how its values come about.");
    const Storage& storage = tensor.storage();
    const auto is_known = [&storage](const auto& entry) { return isSameStorage(entry.first, storage); };
    if (std::none_of(storages.begin(), storages.end(), is_known)) {
      storages.emplace_back(storage, std::move(value));
    }
  }
  return storages;
}

void checkFits(const Storage& fake, const Storage& real) {
  TORCH_CHECK(real.device() == fake.device(), "A tensor was recorded on ", fake.device(),
              ", but replaying its construction put it on ", real.device(),
              ". Construct it with an explicit `device`, or materialize it where that device exists.");
}

}  // namespace

void materialize(at::ArrayRef<Tensor> tensors) {
  const ReplayLock lock(replayMutex());
  const auto recorded = recordedStorages(tensors);
  std::vector<StorageValuePtr> values;
  values.reserve(recorded.size());
  for (const auto& [fake, value] : recorded) {
    values.push_back(value);
  }
  const std::vector<Storage> storages = computeValues(values, /*keep_small=*/false);
  for (const auto i : c10::irange(recorded.size())) {
    checkFits(recorded[i].first, storages[i]);
  }
  for (const auto i : c10::irange(recorded.size())) {
    becomeReal(recorded[i].first, storages[i]);
  }
}

Tensor evaluate(const Tensor& deferred) {
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Only the value of a deferred tensor can be evaluated.");
  return Geometry::of(deferred).makeTensor(computeValues({value}, /*keep_small=*/false).front());
}

std::vector<Storage> computeValues(const std::vector<StorageValuePtr>& values, bool keep_small) {
  if (values.empty()) {
    return {};
  }
  const ReplayLock lock(replayMutex());
  std::vector<Storage> storages = Replay{values}.run();
  const auto add_bytes = [](std::size_t sum, const Storage& storage) { return sum + storage.nbytes(); };
  if (keep_small && std::accumulate(storages.begin(), storages.end(), std::size_t{0}, add_bytes) <= kSmallBytes) {
    for (const auto i : c10::irange(values.size())) {
      values[i]->fold(storages[i]);
    }
  }
  return storages;
}

}  // namespace torchext
