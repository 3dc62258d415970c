#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/fake/storage/fake_storage.h"

namespace torchext {

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
class Retained final : public Provenance {
 public:
  // `tensors` show `recorded`, a fake storage with a recorded value that is about to become real.
  Retained(const c10::Storage& recorded, const std::vector<at::Tensor>& tensors);
  C10_DISABLE_COPY_AND_ASSIGN(Retained);
  ~Retained() override = default;

  // Attaches `retained` to its tensors, which have become real on `current`.
  static void attach(const std::shared_ptr<Retained>& retained,
                     const c10::Storage& current,
                     const std::vector<at::Tensor>& tensors);

  // Returns the retained recording of `tensor`. Null if it has none, or has been given other data.
  static std::shared_ptr<Retained> of(const at::Tensor& tensor);

  const StorageValuePtr& value() const noexcept {
    return value_;
  }

  // Returns the recorded geometry of `tensor`, one of those that this object was made for.
  Geometry recordedGeometry(const at::Tensor& tensor) const;

  // Raises ValueError if a tensor has been reshaped in place beyond the recorded size.
  void checkFits() const;

  // Frees the memory and defers the tensors.
  void deferAgain() const;

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
  std::vector<Found> tensors() const;
  Geometry geometryAfterwards(const Found& found) const;
  void moveTo(const c10::Storage& fake, const Found& found) const;
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

}  // namespace torchext
