#pragma once

// Where materialized tensors go.

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

namespace torchext {

// A device or a dtype that is not set is the recorded one. The dtype is for floating point and complex tensors only.
struct Placement {
  std::optional<c10::Device> device;
  std::optional<c10::ScalarType> dtype;
};

// Returns `placement` with the index of its device. Raises when it names a device that tensors with data cannot be on,
// or a dtype that is neither floating point nor complex.
Placement checkedPlacement(const Placement& placement);

// NOTE [Becoming real elsewhere]
//
// A tensor that is to be real on another device, or with another dtype, than the recorded one is first computed as
// recorded, because that is what the bits depend on, and then copied. The copy is a storage of its own, onto which all
// tensors of the fake storage move as by `.data =`: they stay the objects that they are, and keep sharing. The copy has
// the same elements in the same places, so that sizes, strides and offsets of views stay valid. This is why all tensors
// on a storage must have one dtype, if it is to change.
//
// The fake storage itself stays as it is. A real tensor that was given fake `.data` cannot be found through it and
// stays deferred there, which is better than memory on a device that it does not expect.
struct Move {
  std::optional<c10::Device> device;
  // What the elements are, and what they become.
  std::optional<std::pair<c10::ScalarType, c10::ScalarType>> dtypes;

  bool isNeeded() const noexcept {
    return device.has_value() || dtypes.has_value();
  }
};

// What has to be done to the storage of `tensor`, which is fake, for `tensor` to be at `placement`. Raises ValueError
// when other tensors on the storage forbid it.
Move planMove(const at::Tensor& tensor, const Placement& placement);

// Makes the tensors on `fake` real, and those of `tensors` that are on it, with what `move` makes of `real`. Returns
// the storage that they are on. Nothing has changed when it raises.
c10::Storage becomeRealElsewhere(const c10::Storage& fake,
                                 const c10::Storage& real,
                                 const Move& move,
                                 at::ArrayRef<at::Tensor> tensors);

// The same with `moved`, which has been made already of what `fake` is to be.
void moveOnto(const c10::Storage& fake, const c10::Storage& moved, const Move& move, at::ArrayRef<at::Tensor> tensors);

}  // namespace torchext
