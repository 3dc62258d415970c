#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "graph/op_graph.h"

namespace torchext {

// NOTE [Back again]
//
// A tensor that was materialized with its recording kept can be deferred again: its memory is freed, and its recorded
// value is its value once more. What is kept belongs to the tensors themselves (`FakeTensorImpl::retained()`), those
// that were fake until then. It is freed with the last of them, or when they are given other data (`.data =`).
//
// Where a tensor became real in place, its storage becomes fake in place. Views that were made of it while it was real
// are ordinary tensors, which cannot be found. They show that storage, so reading them raises an error that says that
// there is no data, until the storage is real again. Where a tensor was placed elsewhere, NOTE [Becoming real
// elsewhere], it goes back to the storage that it left. And memory that has been lent to NumPy or another process is
// left to them: the tensors go to a new fake storage, and the memory is freed with the last tensor that shows it.
class Retained final : public Provenance {
 public:
  // For `tensors`, which show `recorded`, a fake storage with a recorded value that is about to become real.
  Retained(const c10::Storage& recorded, const std::vector<at::Tensor>& tensors);
  C10_DISABLE_COPY_AND_ASSIGN(Retained);
  ~Retained() override;

  // Attaches it to the tensors, which have become real on `current`.
  static void attach(const std::shared_ptr<Retained>& retained, const c10::Storage& current);

  // The recording of `tensor`, or null, also when `tensor` has been given other data.
  static std::shared_ptr<Retained> of(const at::Tensor& tensor);

  const StorageValuePtr& value() const noexcept {
    return value_;
  }

  // How `tensor`, one of those that it was made for, showed its value.
  Geometry recordedGeometry(const at::Tensor& tensor) const;

  // Raises ValueError when a tensor has been reshaped in place beyond what was recorded.
  void checkFits() const;

  // Frees the memory, and lets the tensors be deferred.
  void deferAgain() const;

 private:
  struct Holder {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    Geometry recorded;
    // When it had become real. Meaningless for inference tensors, which have none.
    std::uint32_t version = 0;
  };

  struct Found {
    at::Tensor tensor;
    const Holder* holder;
  };

  // Those that are alive and still show the data that they were given.
  std::vector<Found> tensors() const;
  Geometry geometryAfterwards(const Found& found) const;
  void moveTo(const c10::Storage& fake, const Found& found) const;
  bool wasPlaced() const noexcept {
    return recorded_.has_value();
  }

  StorageValuePtr value_;
  std::size_t nbytes_;
  c10::weak_intrusive_ptr<c10::StorageImpl> current_;
  // Set when the tensors have left it.
  std::optional<c10::Storage> recorded_;
  std::vector<Holder> holders_;
};

// A value, and how a tensor shows it.
struct Recording {
  StorageValuePtr value;
  Geometry geometry;
};

// What is recorded of `tensor`, which is deferred, or real and retained. Without a value if nothing is.
Recording recordingOf(const at::Tensor& tensor);

// Defers `tensors` again, as they were before they were materialized: all of them or, on an error, none. Raises
// ValueError for one whose recording was not retained, and RuntimeError when its values could not be computed again.
// Leaves deferred tensors as they are.
TORCHEXT_API void deferAgain(at::ArrayRef<at::Tensor> tensors);

// Returns true if `tensor`, which is real, can be deferred again.
TORCHEXT_API bool isRetained(const at::Tensor& tensor);

}  // namespace torchext
