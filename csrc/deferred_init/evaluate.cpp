#include "evaluate.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <c10/util/irange.h>

#include "../fake/fake.h"
#include "../fake/fake_storage.h"
#include "../stack_utils.h"
#include "op_graph.h"
#include "replay.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::Storage;
using torch::jit::Stack;

namespace {

constexpr DispatchKeySet kDeferredInit{DispatchKey::DeferredInit};

// One replay at a time: replaying may fold values. Recursive, because a kernel in Python may read a deferred tensor.
std::recursive_mutex& replayMutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

// Computed values up to this size are kept, so that a constructor that reads values again and again does not compute
// them again and again.
constexpr std::size_t kFoldBytes = std::size_t{1} << 20U;

std::size_t totalBytes(const std::vector<Storage>& storages) {
  return std::accumulate(storages.begin(), storages.end(), std::size_t{0},
                         [](std::size_t sum, const Storage& storage) { return sum + storage.nbytes(); });
}

// The deferred tensors of a call and real ones with the same values.
class RealArguments {
 public:
  enum class Keep : std::uint8_t { kNothing, kSmallValues };

  RealArguments(const Stack& stack, std::size_t count, Keep keep);

  // The real tensor in the place of `tensor`, or `tensor` itself when it is not deferred.
  Tensor realOf(const Tensor& tensor) const;

  // The tensor that `real` stands for, or an undefined one.
  Tensor originalOf(const Tensor& real) const;

  // The real storage in the place of the one that `tensor` shows.
  const Storage& storageOf(const Tensor& tensor) const;

  bool holds(const Storage& storage) const;

 private:
  struct Entry {
    Tensor original;
    Tensor real;
  };
  std::vector<Entry> entries_;
};

RealArguments::RealArguments(const Stack& stack, std::size_t count, Keep keep) {
  std::vector<StorageValuePtr> values;
  std::vector<std::size_t> value_of_entry;
  const auto collect = [&](const Tensor& tensor) {
    if (StorageValuePtr value = valueOf(tensor)) {
      const auto known = std::find(values.begin(), values.end(), value);
      value_of_entry.push_back(static_cast<std::size_t>(known - values.begin()));
      if (known == values.end()) {
        values.push_back(std::move(value));
      }
      entries_.push_back({tensor, {}});
    }
  };
  forEachTensor(stack, count, collect);
  const std::lock_guard<std::recursive_mutex> lock(replayMutex());
  const std::vector<Storage> storages = Replay{values}.run();
  for (const auto i : c10::irange(entries_.size())) {
    entries_[i].real = Geometry::of(entries_[i].original).makeTensor(storages[value_of_entry[i]]);
  }
  if (keep == Keep::kSmallValues && totalBytes(storages) <= kFoldBytes) {
    for (const auto i : c10::irange(values.size())) {
      values[i]->fold(storages[i]);
    }
  }
}

Tensor RealArguments::realOf(const Tensor& tensor) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&tensor](const Entry& entry) { return entry.original.is_same(tensor); });
  return found == entries_.end() ? tensor : found->real;
}

Tensor RealArguments::originalOf(const Tensor& real) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&real](const Entry& entry) { return entry.real.is_same(real); });
  return found == entries_.end() ? Tensor{} : found->original;
}

bool RealArguments::holds(const Storage& storage) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&storage](const Entry& entry) { return isSameStorage(entry.real.storage(), storage); });
}

std::vector<Tensor> writtenDeferred(const OperatorHandle& op, const Stack& stack) {
  std::vector<Tensor> written;
  const auto& arguments = op.schema().arguments();
  for (const auto i : c10::irange(arguments.size())) {
    if (isWritten(arguments[i])) {
      const auto visit = [&written](const Tensor& tensor) {
        if (valueOf(tensor) != nullptr) {
          written.push_back(tensor);
        }
      };
      forEachTensor(torch::jit::peek(stack, i, arguments.size()), visit);
    }
  }
  return written;
}

}  // namespace

void materialize(at::ArrayRef<Tensor> tensors) {
  std::vector<Storage> fakes;
  std::vector<StorageValuePtr> values;
  for (const Tensor& tensor : tensors) {
    if (!isFake(tensor)) {
      continue;
    }
    const StorageValuePtr value = valueOf(tensor);
    TORCH_CHECK_VALUE(value != nullptr, "A fake tensor of shape ", tensor.sizes(),
                      " cannot be materialized, because it was not "
                      "constructed by deferred_init: there is no record of how its values come about.");
    const auto shows = [&tensor](const Storage& fake) { return isSameStorage(fake, tensor.storage()); };
    if (std::none_of(fakes.begin(), fakes.end(), shows)) {
      fakes.push_back(tensor.storage());
      values.push_back(value);
    }
  }
  if (fakes.empty()) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(replayMutex());
  std::vector<Storage> storages = Replay{values}.run();
  for (const auto i : c10::irange(fakes.size())) {
    if (isFakeStorage(fakes[i])) {  // another thread may have been faster
      becomeReal(fakes[i], std::move(storages[i]));
    }
  }
}

Tensor evaluate(const Tensor& deferred) {
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Only the value of a deferred tensor can be evaluated.");
  const std::lock_guard<std::recursive_mutex> lock(replayMutex());
  const Storage storage = Replay{{value}}.run().front();
  return Geometry::of(deferred).makeTensor(storage);
}

void callForReal(const OperatorHandle& op, Stack& stack) {
  const auto count = op.schema().arguments().size();
  const std::vector<Tensor> written = writtenDeferred(op, stack);
  const auto keep = written.empty() ? RealArguments::Keep::kSmallValues : RealArguments::Keep::kNothing;
  const RealArguments arguments{stack, count, keep};
  {
    const RealDispatch guard;
    mapTensors(stack, count, [&arguments](const Tensor& tensor) { return arguments.realOf(tensor); });
    const Stack called(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    op.callBoxed(stack);
    const auto is_argument = [&called](const Tensor& tensor) {
      bool found = false;
      forEachTensor(called, called.size(), [&](const Tensor& argument) { found = found || argument.is_same(tensor); });
      return found;
    };
    const auto to_deferred = [&](const Tensor& result) {
      if (Tensor original = arguments.originalOf(result); original.defined()) {
        return original;
      }
      if (is_argument(result) || !result.has_storage()) {
        return result;
      }
      return deferConstant(arguments.holds(result.storage()) ? result.clone() : result);
    };
    mapTensors(stack, op.schema().returns().size(), to_deferred);
  }
  for (const Tensor& tensor : written) {
    setProvenance(tensor.storage(), std::make_shared<StorageValue>(arguments.realOf(tensor).storage()), kDeferredInit);
  }
}

void callInScratch(const OperatorHandle& op, const Stack& stack) {
  const auto count = op.schema().arguments().size();
  const RealArguments arguments{stack, count, RealArguments::Keep::kNothing};
  Stack scratch(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  mapTensors(scratch, count, [&arguments](const Tensor& tensor) { return arguments.realOf(tensor); });
  const RealDispatch guard;
  op.callBoxed(scratch);
}

Tensor deferConstant(const Tensor& constant) {
  Tensor deferred = fakeLike(constant);
  setProvenance(deferred.storage(), std::make_shared<StorageValue>(constant.storage()), kDeferredInit);
  return deferred;
}

}  // namespace torchext
