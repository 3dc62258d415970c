#pragma once

// Materializes at another place, for a while, as fakes, or with other data. Values that can be put back.

#include <cstddef>
#include <optional>
#include <utility>

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

struct MaterializeOptions {
  Placement placement;
  // Keeps the recording, so that the tensors can be deferred again: NOTE [Deferring again].
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

// Sets the hook of `materialize()`. Call while the library is loaded.
void registerPlacements();

// Returns the predicted cost of `evaluate(deferred)`, without computing anything, in bytes: the peak of host memory,
// including the value itself if it is on the host, and the bytes that all operators write. Raises ValueError if
// `deferred` is not deferred.
TORCHEXT_API std::pair<std::size_t, std::size_t> needsOf(const at::Tensor& deferred);

// ---- Recordings that were kept ----

// NOTE [Deferring again]
//
// A tensor that was materialized with its recording kept can be deferred again: its memory is freed, and its recorded
// value becomes its value again. The retained data belong to the tensors that were fake until then
// (`FakeTensorImpl::retained()`). They are freed with the last of these tensors, or when they are given other data
// (`.data =`).
//
// If a tensor became real in place, its storage becomes fake in place. Views of it that were made while it was real are
// ordinary tensors, which cannot be found. They show that storage, so reading them raises an error about missing data
// until the storage is real again. A tensor that was placed elsewhere, NOTE [Materializing elsewhere], returns to the
// storage that it left. Memory that has been lent to NumPy or another process stays with the borrower: the tensors move
// to a new fake storage, and the memory is freed with the last tensor that shows it.

// A value and the geometry of a tensor that shows it.
struct Recording {
  StorageValuePtr value;
  Geometry geometry;
};

// Returns the recording of `tensor`, which is deferred, or real and retained. Its value is null if nothing is recorded.
TORCHEXT_API Recording recordingOf(const at::Tensor& tensor);

// Defers `tensors` again, as they were before they were materialized: all of them or, on an error, none. Raises
// ValueError for a tensor whose recording was not retained, and RuntimeError if its values could not be computed again.
// Deferred tensors do not change.
TORCHEXT_API void deferAgain(at::ArrayRef<at::Tensor> tensors);

// Returns true if `tensor`, which is real, can be deferred again.
TORCHEXT_API bool isRetained(const at::Tensor& tensor);

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
