#pragma once

// Materializes at another place, for a while, as fakes, or with other data. Values that can be put back.

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/deferred_init.h"
#include "../../core/deferred_init/graph/op_graph.h"

namespace torchext {

// Unset members mean the recorded device or dtype. The dtype applies to floating-point and complex tensors only.
struct Placement {
  std::optional<c10::Device> device;
  std::optional<c10::ScalarType> dtype;
};

// Returns `placement` with the index of its device. Raises if tensors cannot be on the device, with data or as fakes,
// or if the dtype is neither floating point nor complex.
Placement checkedPlacement(const Placement& placement, bool is_fake);

// NOTE [Materializing elsewhere]
//
// A tensor that becomes real on another device or with another dtype than recorded is first computed as recorded,
// because the bits depend on that, and then copied. The copy is a new storage. All tensors of the fake storage move to
// it as by `.data =`: they stay the same objects, and still share memory. The copy has the same elements in the same
// places, so sizes, strides and offsets of views stay valid. Therefore all tensors on a storage must have one dtype if
// it changes.
//
// The fake storage itself does not change. A real tensor that was given fake `.data` cannot be found through it and
// stays deferred. That is better than memory on an unexpected device.
struct Move {
  std::optional<c10::Device> device;
  // The old and the new dtype of the elements.
  std::optional<std::pair<c10::ScalarType, c10::ScalarType>> dtypes;

  bool isNeeded() const noexcept {
    return device.has_value() || dtypes.has_value();
  }
};

// Returns the change to the storage of `tensor`, which is fake, that puts `tensor` at `placement`. Raises ValueError if
// other tensors on the storage prevent it.
Move planMove(const at::Tensor& tensor, const Placement& placement);

// Makes the tensors on `fake`, including those of `tensors` that are on it, real with `real` after `move`. Returns
// their new storage. If it raises, nothing has changed.
c10::Storage becomeRealElsewhere(const c10::Storage& fake,
                                 const c10::Storage& real,
                                 const Move& move,
                                 at::ArrayRef<at::Tensor> tensors);

// Moves the tensors to a new fake storage: NOTE [Materializing as fakes]. `value` has its bytes, or is null.
void becomeFakeElsewhere(const c10::Storage& fake,
                         const Move& move,
                         at::ArrayRef<at::Tensor> tensors,
                         bool is_pinned,
                         const c10::Storage& value);

// The same with `moved`, the storage after the move.
void moveOnto(const c10::Storage& fake, const c10::Storage& moved, const Move& move, at::ArrayRef<at::Tensor> tensors);

struct MaterializeOptions {
  Placement placement;
  // Keeps the recording, so that the tensors can be deferred again: retained.h.
  bool retain = false;
  // Called once for each completed storage.
  Progress on_done = ignoreProgress;
};

// Like `materialize(tensors)` of the public API, with options. `placed` move to the placement; `others` stay where they
// were recorded, unless they share a storage with one of `placed`.
//
// If all tensors stay where they were recorded, this is one pass over the graph, and an error leaves all of them
// unchanged.
//
// Otherwise, NOTE [Materializing elsewhere], storages are processed one by one, so that memory holds at most one of
// them twice. Common inputs are computed again for each storage. All possible checks run before the first change. After
// a later error, each storage is either complete or unchanged.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> placed,
                              at::ArrayRef<at::Tensor> others,
                              const MaterializeOptions& options);

// NOTE [Materializing as fakes]
//
// A dry run computes no values. While `gives_fakes` is set, `materialize()` on threads in fake_mode drops the
// recordings, and the tensors become fakes on new storages at the placement, which count as allocations. Other fakes do
// not change. Nothing is retained. Takes no lock.
TORCHEXT_API void materializeAsFakes(bool gives_fakes);
TORCHEXT_API bool materializesAsFakes() noexcept;

// The predicted cost of `evaluate(deferred)`, without computing anything, in bytes: the peak of host memory, including
// the value itself if it is on the host, and the bytes that all operators write. Raises ValueError if `deferred` is not
// deferred.
struct ReplayNeeds {
  std::size_t peak = 0;
  std::size_t written = 0;
};
TORCHEXT_API ReplayNeeds needsOf(const at::Tensor& deferred);

// Sets the hook of `materialize()`. Call while the library is loaded.
void registerPlacements();

// ---- Other data ----

// Makes `deferred` real with the elements of `data`, in place, without copying them: the two share memory afterwards,
// even if `data` is a view. If `data` has another device or dtype, `deferred` moves there, with all other tensors that
// show its storage: NOTE [Materializing elsewhere]. Its recording is dropped.
//
// Returns false, and changes nothing, unless `deferred` is deferred, shows all of its storage in order, is not pinned,
// and has the shape of `data`, which must be real, contiguous and aligned.
//
// Raises ValueError if other tensors on the storage do not allow the dtype.
TORCHEXT_API bool adopt(const at::Tensor& deferred, const at::Tensor& data);

// Makes the elements of `data` the value of `deferred`, which stays deferred, without copying or reading them. `data`
// must not be written while a recorded operator or tensor refers to that value: RecordedValue::keepApart().
//
// Returns false, and changes nothing, if `adopt()` would, or if `data` has another device or dtype.
TORCHEXT_API bool showData(const at::Tensor& deferred, const at::Tensor& data);

// ---- Values that can be put back ----

// The value that a deferred tensor shows at some time. It can be compared with the tensor's later value, and restored.
// Keeps the storage and the recording alive.
class TORCHEXT_API RecordedValue {
 public:
  // Raises ValueError unless `tensor` is deferred.
  explicit RecordedValue(const at::Tensor& tensor);

  // Returns true if `tensor` shows this value: no write to its storage has been recorded since, its data have not been
  // replaced, and it has not become real.
  bool isOf(const at::Tensor& tensor) const;

  // Makes it the value of its storage again, for all tensors on it. Does nothing if the storage has become real.
  void putBack() const;

  // Copies the data of a value that `showData()` made, if a recorded operator or tensor still refers to it. Call it
  // before these data are written.
  void keepApart() const;

 private:
  c10::Storage storage_;
  StorageValuePtr value_;
};

}  // namespace torchext
