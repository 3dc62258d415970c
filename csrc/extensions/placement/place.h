#pragma once

// The placement of materialized tensors.

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

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

}  // namespace torchext
