#include "place.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/sizes.h"
#include "../cuda/fake_cuda.h"

namespace torchext {

using at::Tensor;
using c10::ScalarType;
using c10::Storage;

namespace {

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

}  // namespace

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

Storage becomeRealElsewhere(const Storage& fake, const Storage& real, const Move& move, at::ArrayRef<Tensor> tensors) {
  Storage storage = moved(real, move);
  moveOnto(fake, storage, move, tensors);
  return storage;
}

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

}  // namespace torchext
