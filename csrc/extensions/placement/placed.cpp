#include "placed.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/irange.h>
#include <torchext/deferred_init.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/replay/replay.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"
#include "../cuda/fake_cuda.h"
#include "../parts/plan_costs.h"

namespace torchext {

using at::Tensor;
using c10::ScalarType;
using c10::Storage;

namespace {

FakeTensorImpl* fakeTensorImpl(const Tensor& tensor) {
  return dynamic_cast<FakeTensorImpl*>(tensor.unsafeGetTensorImpl());
}

std::uint32_t versionOf(const Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

// The recording of tensors that became real: NOTE [Deferring again].
class Retained final : public Provenance {
 public:
  // `tensors` show `recorded`, a fake storage with a recorded value that is about to become real.
  Retained(const Storage& recorded, const std::vector<Tensor>& tensors)
      : value_{valueOf(recorded)}, nbytes_{recorded.nbytes()}, current_{recorded.getWeakStorageImpl()} {
    for (const Tensor& tensor : tensors) {
      holders_.push_back({tensor.unsafeGetTensorImpl(), Geometry::of(tensor)});
    }
  }

  // Attaches `retained` to its tensors, which have become real on `current`.
  static void attach(const std::shared_ptr<Retained>& retained,
                     const Storage& current,
                     const std::vector<Tensor>& tensors) {
    if (retained->current_.lock().get() != current.unsafeGetStorageImpl()) {
      retained->recorded_.emplace(retained->current_.lock());
      retained->current_ = current.getWeakStorageImpl();
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      retained->holders_[i].version = versionOf(tensors[i]);
      fakeTensorImpl(tensors[i])->setRetained(retained);
      addToList(retained->tensors_, *fakeTensorImpl(tensors[i]));
    }
  }

  // Returns the retained recording of `tensor`. Null if it has none, or has been given other data.
  static std::shared_ptr<Retained> of(const Tensor& tensor) {
    const FakeTensorImpl* impl = fakeTensorImpl(tensor);
    auto retained = impl == nullptr ? nullptr : std::dynamic_pointer_cast<Retained>(impl->retained());
    const bool is_current =
        retained != nullptr && retained->current_.lock().get() == tensor.storage().unsafeGetStorageImpl();
    return is_current ? retained : nullptr;
  }

  const StorageValuePtr& value() const noexcept {
    return value_;
  }

  // Returns the recorded geometry of `tensor`, one of those that this object was made for.
  Geometry recordedGeometry(const Tensor& tensor) const {
    const std::vector<Found> found = tensors();
    const auto is_it = [&tensor](const Found& other) { return other.tensor.is_same(tensor); };
    return geometryAfterwards(*std::find_if(found.begin(), found.end(), is_it));
  }

  // Raises ValueError if a tensor has been reshaped in place beyond the recorded size.
  void checkFits() const {
    for (const Found& found : tensors()) {
      const Geometry geometry = geometryAfterwards(found);
      const std::size_t needed = geometry.bytesReached();
      TORCH_CHECK_VALUE(needed <= nbytes_, "A tensor of shape ", found.tensor.sizes(),
                        " cannot be deferred again, because it has been resized since it was materialized: it shows ",
                        needed, " bytes, but its recording makes ", nbytes_, ".");
    }
  }

  // Frees the memory and defers the tensors.
  void deferAgain() const {
    const std::vector<Found> found = tensors();
    const Storage current{current_.lock()};
    // `Tensor.numpy()` (tensor_numpy.cpp) and shared memory mark a storage as not resizable.
    const bool is_lent = !current.resizable();
    const bool stays = !wasPlaced() && !is_lent;
    const Storage fake = stays ? current : recorded_.value_or(makeFakeStorage(nbytes_, current.device()));
    std::vector<Tensor> in_place;
    for (const Found& one : found) {
      removeResident(*fakeTensorImpl(one.tensor));
      fakeTensorImpl(one.tensor)->setRetained(nullptr);
      // An autograd graph that saved changed values must not use the recorded ones instead.
      if (!one.tensor.is_inference() && versionOf(one.tensor) != one.holder->version) {
        one.tensor.unsafeGetTensorImpl()->bump_version();
      }
      if (stays) {
        in_place.push_back(one.tensor);
      } else {
        moveTo(fake, one);
      }
    }
    if (!is_lent) {
      // Other tensors on the memory of a tensor that was placed elsewhere permanently find no data there.
      becomeFakeAgain(current, nbytes_, in_place);
    }
    setValue(fake, value_);
  }

 private:
  struct Holder {
    const c10::TensorImpl* tensor;
    Geometry recorded;
    // The version when it became real. Meaningless for inference tensors, which have no version.
    std::uint32_t version = 0;
  };

  struct Found {
    at::Tensor tensor;
    const Holder* holder;
  };

  // Returns the tensors that are alive and still show the data that they were given.
  std::vector<Found> tensors() const {
    std::vector<Found> found;
    for (const Tensor& tensor : tensorsOn(tensors_)) {
      const auto is_its = [&tensor](const Holder& holder) { return holder.tensor == tensor.unsafeGetTensorImpl(); };
      if (of(tensor).get() == this) {
        found.push_back({tensor, &*std::find_if(holders_.begin(), holders_.end(), is_its)});
      }
    }
    return found;
  }

  // Sizes and strides may have been changed in place since, as by `t_()`. Conversions of the dtype are undone.
  Geometry geometryAfterwards(const Found& found) const {
    Geometry geometry = Geometry::of(found.tensor);
    if (wasPlaced()) {
      geometry.dtype = found.holder->recorded.dtype;
      geometry.is_conj = found.holder->recorded.is_conj;
    }
    return geometry;
  }

  void moveTo(const Storage& fake, const Found& found) const {
    const Geometry geometry = geometryAfterwards(found);
    const c10::InferenceMode mode{found.tensor.is_inference()};
    const Tensor form = geometry.makeTensor(fake);
    found.tensor.set_data(makeFakeTensor(fake, *form.unsafeGetTensorImpl()));
  }

  bool wasPlaced() const noexcept {
    return recorded_.has_value();
  }

  StorageValuePtr value_;
  std::size_t nbytes_;
  c10::weak_intrusive_ptr<c10::StorageImpl> current_;
  // The fake storage, if the tensors have left it.
  std::optional<c10::Storage> recorded_;
  std::vector<Holder> holders_;
  // The first of these tensors: fake_tensor_impl.h. Not a weak reference, which `torch.utils.swap_tensors()`
  // refuses.
  FakeTensorImpl* tensors_ = nullptr;
};

// ---- Materializing elsewhere ----

struct Move {
  std::optional<c10::Device> device;
  // The old and the new dtype of the elements.
  std::optional<std::pair<c10::ScalarType, c10::ScalarType>> dtypes;

  bool isNeeded() const noexcept {
    return device.has_value() || dtypes.has_value();
  }
};

bool isConvertible(ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// An empty tensor resolves the index of `cuda`, and raises PyTorch's own error for a device that does not exist.
c10::Device existingDevice(c10::Device device, bool is_fake) {
  TORCH_CHECK_VALUE(!device.is_meta(),
                    "Tensors cannot be materialized on the device `meta`, where they have no values. Leave them "
                    "deferred, or use torchext.fake.meta_like().");
  if (is_fake) {
    const FakeFactoriesGuard guard;
    return at::empty({0}, at::TensorOptions().dtype(c10::kByte).device(device)).device();
  }
  TORCH_CHECK_VALUE(!device.is_cuda() || hasRealCuda(), "Tensors cannot be materialized on ", device,
                    ", because this machine has no CUDA device.");
  const RealDispatch guard;
  return at::empty({0}, at::TensorOptions().dtype(c10::kByte).device(device)).device();
}

// Returns the complete elements of `storage` as a one-dimensional tensor. No tensor shows the remaining bytes.
Tensor elementsOf(const Storage& storage, ScalarType dtype) {
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(dtype);
  const auto count = toSigned(storage.nbytes() / type.itemsize());
  return Geometry{{count}, {1}, 0, type, false, false}.makeTensor(storage);
}

Storage moved(const Storage& real, const Move& move) {
  const RealDispatch guard;
  const ScalarType from = move.dtypes ? move.dtypes->first : ScalarType::Byte;
  const ScalarType to = move.dtypes ? move.dtypes->second : ScalarType::Byte;
  const auto options = at::TensorOptions().device(move.device.value_or(real.device())).dtype(to);
  return elementsOf(real, from).to(options).storage();
}

// Returns a tensor that shows `storage` with the geometry of `tensor`.
Tensor shownAs(const Tensor& tensor, const Storage& storage, const Move& move) {
  Geometry geometry = Geometry::of(tensor);
  if (move.dtypes) {
    geometry.dtype = c10::scalarTypeToTypeMeta(move.dtypes->second);
    // The real part of a conjugate equals the real part.
    geometry.is_conj = geometry.is_conj && c10::isComplexType(move.dtypes->second);
  }
  // The mode at construction determines whether a tensor is an inference tensor.
  const c10::InferenceMode mode{tensor.is_inference()};
  Tensor shown = geometry.makeTensor(storage);
  return isFakeStorage(storage) ? makeFakeTensor(storage, *shown.unsafeGetTensorImpl()) : shown;
}

// Returns the tensors on `fake`, including those of `tensors` that are on it, without duplicates.
std::vector<Tensor> tensorsOn(const Storage& fake, at::ArrayRef<Tensor> tensors) {
  std::vector<Tensor> found = residentsOf(fake);
  for (const Tensor& tensor : tensors) {
    const auto is_it = [&tensor](const Tensor& other) { return other.is_same(tensor); };
    if (isSameStorage(tensor.storage(), fake) && std::none_of(found.begin(), found.end(), is_it)) {
      found.push_back(tensor);
    }
  }
  return found;
}

// Returns `placement` with the index of its device. Raises if tensors cannot be on the device, with data or as fakes,
// or if the dtype is neither floating point nor complex.
Placement checkedPlacement(const Placement& placement, bool is_fake) {
  Placement checked = placement;
  TORCH_CHECK_TYPE(!placement.dtype || isConvertible(*placement.dtype),
                   "`dtype` was expected to be floating point or complex, but it is ",
                   c10::toString(placement.dtype.value_or(ScalarType::Undefined)), ".");
  if (placement.device) {
    checked.device = existingDevice(*placement.device, is_fake);
  }
  return checked;
}

// Returns the change to the storage of `tensor`, which is fake, that puts `tensor` at `placement`. Raises ValueError if
// other tensors on the storage prevent it.
Move planMove(const Tensor& tensor, const Placement& placement) {
  Move move;
  if (placement.device && *placement.device != tensor.device()) {
    move.device = placement.device;
  }
  const ScalarType from = tensor.scalar_type();
  if (!placement.dtype || *placement.dtype == from || !isConvertible(from)) {
    return move;
  }
  for (const Tensor& other : residentsOf(tensor.storage())) {
    TORCH_CHECK_VALUE(other.scalar_type() == from, "A tensor of shape ", tensor.sizes(), " and dtype ", from,
                      " shares its memory with one of shape ", other.sizes(), " and dtype ", other.scalar_type(),
                      ", so it cannot be converted to ", *placement.dtype,
                      " without breaking the sharing. Materialize them without `dtype`, then convert them.");
  }
  move.dtypes = {from, *placement.dtype};
  return move;
}

// Moves the tensors on `fake`, including those of `tensors` that are on it, to `moved`, the storage after the move. If
// it raises, nothing has changed.
void moveOnto(const Storage& fake, const Storage& moved, const Move& move, at::ArrayRef<Tensor> tensors) {
  const std::vector<Tensor> movers = tensorsOn(fake, tensors);
  std::vector<Tensor> data;
  data.reserve(movers.size());
  for (const Tensor& tensor : movers) {
    data.push_back(shownAs(tensor, moved, move));
  }
  for (std::size_t i = 0; i < movers.size(); ++i) {
    // Also drops the node that accumulates gradients, if that expects the old device or dtype.
    movers[i].set_data(data[i]);
  }
}

// Moves the tensors to a new fake storage: NOTE [Materializing as fakes]. `value` has its bytes, or is null.
void becomeFakeElsewhere(
    const Storage& fake, const Move& move, at::ArrayRef<Tensor> tensors, bool is_pinned, const Storage& value) {
  const auto [from, to] = move.dtypes.value_or(std::pair{ScalarType::Byte, ScalarType::Byte});
  const auto options = at::TensorOptions().device(move.device.value_or(fake.device())).dtype(to);
  const RealFactoriesGuard not_deferred;
  const FakeFactoriesGuard guard;
  const auto count = toSigned(fake.nbytes() / c10::elementSize(from));
  const Tensor made = at::empty({count}, options.pinned_memory(is_pinned));
  if (value) {
    made.copy_(elementsOf(value, ScalarType::Byte));  // fakes keep the values of small constants
  }
  moveOnto(fake, made.storage(), move, tensors);
}

std::atomic<bool> gives_fakes = false;

// The fake storages of a request, and where their values go.
struct PlacedRequest {
  Request request;
  std::vector<Move> moves;  // one for each storage of the request

  void add(const Tensor& tensor, const Placement& placement) {
    if (materializesAsFakes() && !isDeferred(tensor)) {
      return;
    }
    const auto place = request.add(tensor);
    moves.resize(request.storages().size());
    if (!place) {
      return;
    }
    if (Move move = planMove(tensor, placement); move.isNeeded()) {
      moves[*place] = std::move(move);
    }
  }
};

// Makes the tensors of `pending` real with `real`, which holds their recorded value.
void becomeRealWith(const Pending& pending, const Move& move, const Storage& real, bool retain) {
  const std::vector<Tensor> residents = retain ? residentsOf(pending.fake) : std::vector<Tensor>{};
  const auto retained = retain ? std::make_shared<Retained>(pending.fake, residents) : nullptr;
  Storage current = pending.fake;
  if (move.isNeeded()) {
    current = moved(real, move);
    moveOnto(pending.fake, current, move, pending.tensors);
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
  const bool is_possible = peakOnCpuOf(plan) <= 4 * kMostKnownBytes && canRun(plan);
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
  PlacedRequest all;
  for (const Tensor& tensor : placed) {
    all.add(tensor, placement);
  }
  for (const Tensor& tensor : others) {
    all.add(tensor, {});
  }
  std::vector<Pending>& storages = all.request.storages();
  const std::vector<Move>& moves = all.moves;
  const bool stay = std::none_of(moves.begin(), moves.end(), [](const Move& move) { return move.isNeeded(); });
  if (!materializesAsFakes() && stay) {
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

std::pair<std::size_t, std::size_t> needsOf(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Cannot estimate memory: the tensor is not deferred.");
  const ReplayPlan plan{{value}, CacheUse::kReads};
  return {peakOnCpuOf(plan), bytesWrittenBy(plan)};
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

// ---- Recordings that were kept ----

void deferAgain(at::ArrayRef<Tensor> tensors) {
  const Locked lock{LockRank::kReplay};
  std::vector<std::shared_ptr<Retained>> all;
  std::vector<StorageValuePtr> values;
  for (const Tensor& tensor : tensors) {
    if (valueOf(tensor) != nullptr) {
      continue;
    }
    auto retained = Retained::of(tensor);
    TORCH_CHECK_VALUE(retained != nullptr, "A tensor of shape ", tensor.sizes(),
                      " cannot be deferred again, because its recording was not retained.");
    if (std::find(all.begin(), all.end(), retained) == all.end()) {
      retained->checkFits();
      values.push_back(retained->value());
      all.push_back(std::move(retained));
    }
  }
  Replay{values}.check();
  for (const auto& retained : all) {
    retained->deferAgain();
  }
}

Recording recordingOf(const Tensor& tensor) {
  if (const auto retained = Retained::of(tensor)) {
    return {retained->value(), retained->recordedGeometry(tensor)};
  }
  return {valueOf(tensor), Geometry::of(tensor)};
}

bool isRetained(const Tensor& tensor) {
  return Retained::of(tensor) != nullptr;
}

// ---- Other data ----

namespace {

// Returns a storage with the bytes that `data` shows, which keeps the storage of `data` alive.
Storage storageOver(const Tensor& data) {
  auto memory = c10::InefficientStdFunctionContext::makeDataPtr(
      data.data_ptr(), [owner = data.storage()](void* /*memory*/) {}, data.device());
  return Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, data.nbytes(),
                                                       std::move(memory), /*allocator=*/nullptr,
                                                       /*resizable=*/false)};
}

bool showsAllInOrder(const Tensor& tensor) {
  return Geometry::of(tensor).isContiguous() && tensor.storage_offset() == 0 && tensor.numel() > 0 &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool isPlainMemory(const Tensor& data) {
  return data.layout() == c10::kStrided && data.has_storage() && !isFake(data) && !data.is_meta() && !data.is_conj() &&
         !data.is_neg() && data.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(data.const_data_ptr()) % data.itemsize() == 0;
}

bool canShow(const Tensor& deferred, const Tensor& data) {
  const StorageValuePtr value = isDeferred(deferred) ? valueOf(deferred) : nullptr;
  return value != nullptr && !value->isPinned() && deferred.sizes() == data.sizes() && showsAllInOrder(deferred) &&
         isPlainMemory(data);
}

}  // namespace

bool showData(const Tensor& deferred, const Tensor& data) {
  const Locked lock{LockRank::kReplay};
  if (!canShow(deferred, data) || deferred.device() != data.device() || deferred.dtype() != data.dtype()) {
    return false;
  }
  setValue(deferred.storage(), std::make_shared<StorageValue>(storageOver(data)));
  return true;
}

bool adopt(const Tensor& deferred, const Tensor& data) {
  const Locked lock{LockRank::kReplay};
  if (!canShow(deferred, data)) {
    return false;
  }
  const Storage fake = deferred.storage();
  const Move move = planMove(deferred, {data.device(), data.scalar_type()});
  if (!move.dtypes && deferred.scalar_type() != data.scalar_type()) {
    return false;
  }
  if (move.isNeeded()) {
    moveOnto(fake, storageOver(data), move, {deferred});
  } else {
    becomeReal(fake, storageOver(data));
  }
  return true;
}

RecordedValue::RecordedValue(const Tensor& tensor) : value_{valueOf(tensor)} {
  TORCH_CHECK_VALUE(value_ != nullptr, "A tensor of shape ", tensor.sizes(), " has no recorded value.");
  storage_ = tensor.storage();
}

bool RecordedValue::isOf(const Tensor& tensor) const {
  return valueOf(tensor) == value_;
}

void RecordedValue::putBack() const {
  const Locked lock{LockRank::kReplay};
  setValue(storage_, value_);
}

void RecordedValue::keepApart() const {
  const Locked lock{LockRank::kReplay};
  if (value_.use_count() == 1 || value_->writer() != nullptr) {
    return;
  }
  const RealDispatch guard;
  const c10::Storage copy = value_->makeEmptyStorage();
  bytesAt(copy, 0, copy.nbytes()).copy_(bytesAt(value_->constant(), 0, copy.nbytes()));
  value_->fold(copy);
}

}  // namespace torchext
