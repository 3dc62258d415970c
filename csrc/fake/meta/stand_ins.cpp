#include "stand_ins.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/irange.h>

#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../cache/pointer_numbers.h"
#include "../calls/op_traits.h"
#include "../cuda/fake_cuda.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "shadows.h"

namespace torchext {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::ScalarType;
using c10::Storage;
using torch::jit::Stack;

namespace {

// The stand-ins of tensors on a storage larger than this do not share a storage: each gets one that is just large
// enough.
constexpr std::size_t kSmallStorage = std::size_t{1} << 16U;

// Sizes up to this one are kept if they cannot be divided.
constexpr int64_t kSmallSize = 64;

ScalarType dtypeOf(ScalarType dtype, Dtypes dtypes) {
  if (dtypes == Dtypes::kFloat) {
    return ScalarType::Float;
  }
  if (dtypes == Dtypes::kKept || dtype == ScalarType::Bool) {
    return dtype;
  }
  return c10::isIntegralType(dtype, /*includeBool=*/false) ? ScalarType::Long : ScalarType::Float;
}

// The bytes of the number 1.
struct One {
  std::array<std::byte, 16> bytes{};
  std::size_t size = 0;

  explicit One(ScalarType dtype) : size{c10::elementSize(dtype)} {
    const auto set = [this](auto one) { std::memcpy(bytes.data(), &one, sizeof(one)); };
    switch (dtype) {
#define TORCHEXT_SET_ONE(Type, Name) \
  case ScalarType::Name:             \
    set(static_cast<Type>(1));       \
    break;
      AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(TORCHEXT_SET_ONE)
#undef TORCHEXT_SET_ONE
      default:
        break;  // nothing computes with these dtypes: stays 0
    }
  }

  void writeTo(std::byte* address) const {
    std::memcpy(address, bytes.data(), size);
  }
};

std::byte* dataOf(const Tensor& tensor) {
  return static_cast<std::byte*>(tensor.storage().mutable_data());
}

// Fills the whole storage, since the tensor may be expanded.
void fillWithOnes(const Tensor& tensor) {
  const One one{tensor.scalar_type()};
  std::byte* data = dataOf(tensor);
  for (std::size_t i = 0; i + one.size <= tensor.storage().nbytes(); i += one.size) {
    one.writeTo(data + i);
  }
}

// Writes ones to the diagonals of all matrices in `tensor`.
void fillWithIdentity(const Tensor& tensor) {
  if (tensor.dim() < 2) {
    fillWithOnes(tensor);
    return;
  }
  if (tensor.numel() == 0) {
    return;
  }
  const One one{tensor.scalar_type()};
  std::byte* data = dataOf(tensor) + static_cast<std::size_t>(tensor.storage_offset()) * one.size;
  const int64_t diagonal = std::min(tensor.size(-1), tensor.size(-2));
  const int64_t matrices = tensor.numel() / (tensor.size(-1) * tensor.size(-2));
  for (const auto matrix : c10::irange(matrices)) {
    int64_t position = 0;
    int64_t rest = matrix;
    for (int64_t dim = tensor.dim() - 3; dim >= 0; --dim) {
      position += rest % tensor.size(dim) * tensor.stride(dim);
      rest /= tensor.size(dim);
    }
    for (const auto i : c10::irange(diagonal)) {
      const int64_t element = position + i * (tensor.stride(-1) + tensor.stride(-2));
      one.writeTo(data + static_cast<std::size_t>(element) * one.size);
    }
  }
}

void fill(const Tensor& tensor, Fill fill) {
  const bool has_fraction = c10::isFloatingType(tensor.scalar_type()) || c10::isComplexType(tensor.scalar_type());
  if (fill == Fill::kOnes) {
    fillWithOnes(tensor);
  } else if (fill == Fill::kIdentity && has_fraction) {
    fillWithIdentity(tensor);
  }
}

// Returns strides for `sizes` in the order of `strides`, without gaps. Expanded dimensions stay expanded.
c10::DimVector stridesInOrder(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  c10::DimVector result(sizes.size());
  int64_t stride = 1;
  for (const std::size_t dim : order) {
    const bool is_expanded = strides[dim] == 0;
    result[dim] = is_expanded ? 0 : stride;
    stride *= is_expanded ? 1 : std::max<int64_t>(sizes[dim], 1);
  }
  return result;
}

// Returns true for an argument with pivots. LAPACK counts them from 1, does not check them, and would write anywhere.
bool isPivots(const c10::Argument& argument) {
  return argument.name().find("pivots") != std::string::npos;
}

class StandIns {
 public:
  explicit StandIns(const Likeness& likeness) : likeness_{likeness}, scale_{likeness.divisor} {}

  IValue of(const IValue& value, const c10::Argument& argument);
  Tensor of(const Tensor& tensor, Fill fill_with);

 private:
  Tensor make(const Tensor& tensor);
  Tensor makeAlone(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) const;
  Storage storageOf(const Storage& storage);

  Likeness likeness_;
  SizeScale scale_;
  PointerNumbers tensors_;
  std::vector<Tensor> stand_ins_;
  PointerNumbers storages_;
  std::vector<Storage> stand_in_storages_;
};

Tensor StandIns::of(const Tensor& tensor, Fill fill_with) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return realNumber(tensor);
  }
  const auto [number, is_new] = tensors_.add(tensor.unsafeGetTensorImpl());
  if (is_new) {
    stand_ins_.push_back(make(tensor));
    fill(stand_ins_.back(), fill_with);
  }
  return stand_ins_[number];
}

Tensor StandIns::make(const Tensor& tensor) {
  const ScalarType dtype = dtypeOf(tensor.scalar_type(), likeness_.dtypes);
  if (!scale_.keepsAll()) {
    c10::DimVector sizes(tensor.sizes());
    std::transform(sizes.begin(), sizes.end(), sizes.begin(), [this](int64_t size) { return scale_.of(size); });
    return makeAlone(tensor, sizes, stridesInOrder(sizes, tensor.strides()));
  }
  if (dtype != tensor.scalar_type() || tensor.storage().nbytes() > kSmallStorage || !holdsItsElements(tensor)) {
    return makeAlone(tensor, tensor.sizes(), tensor.strides());
  }
  return makeStridedTensor(storageOf(tensor.storage()), dtype, tensor.sizes(), tensor.strides(),
                           tensor.storage_offset(), tensor.key_set() & kLazyBits);
}

Tensor StandIns::makeAlone(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) const {
  const ScalarType dtype = dtypeOf(tensor.scalar_type(), likeness_.dtypes);
  Storage storage = makeZeroStorage(at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype)));
  return makeStridedTensor(std::move(storage), dtype, sizes, strides, /*storage_offset=*/0,
                           tensor.key_set() & kLazyBits);
}

Storage StandIns::storageOf(const Storage& storage) {
  const auto [number, is_new] = storages_.add(storage.unsafeGetStorageImpl());
  if (is_new) {
    stand_in_storages_.push_back(makeZeroStorage(storage.nbytes()));
  }
  return stand_in_storages_[number];
}

IValue StandIns::of(const IValue& value, const c10::Argument& argument) {
  if (isGenerator(argument)) {
    return value.isNone() || value.toGenerator().device().is_cpu() ? IValue{at::detail::createCPUGenerator()} : value;
  }
  if (value.isBool() && argument.name() == "pin_memory") {
    // Without an accelerator, the kernel has to refuse to pin. A fake accelerator has no allocator that could.
    return value.toBool() && fakeCudaDeviceCount() == 0;
  }
  if (value.isInt()) {
    return scale_.ofNumber(value.toInt());
  }
  if (value.isIntList()) {
    std::vector<int64_t> numbers = value.toIntVector();
    std::transform(numbers.begin(), numbers.end(), numbers.begin(),
                   [this](int64_t number) { return scale_.ofNumber(number); });
    return numbers;
  }
  const Fill fill_with = isPivots(argument) ? Fill::kOnes : likeness_.fill;
  return mapTensors(value, [&](const Tensor& tensor) { return of(tensor, fill_with); });
}

// How many elements lie between the first and the last one of `tensor`, these included: a column of a matrix needs the
// memory of nearly all of it.
double extentOf(const Tensor& tensor) {
  double extent = 1;
  for (const auto i : c10::irange(tensor.dim())) {
    extent += static_cast<double>(tensor.size(i) - 1) * static_cast<double>(tensor.stride(i));
  }
  return tensor.numel() == 0 ? 0 : extent;
}

}  // namespace

int64_t SizeScale::of(int64_t size) {
  if (keepsAll()) {
    return size;
  }
  const auto known =
      std::find_if(replaced_.begin(), replaced_.end(), [size](const auto& pair) { return pair.first == size; });
  if (known != replaced_.end()) {
    return known->second;
  }
  // Odd and distinct, for the first few.
  const auto substitute = 2 * static_cast<int64_t>(replaced_.size()) + 17;
  int64_t scaled = size;
  if (size % divisor_ == 0 && size >= 2 * divisor_) {
    scaled = size / divisor_;
  } else if (size > kSmallSize) {
    scaled = std::min(substitute, kSmallSize);
  }
  replaced_.emplace_back(size, scaled);
  return scaled;
}

int64_t SizeScale::ofNumber(int64_t number) const {
  const auto known =
      std::find_if(replaced_.begin(), replaced_.end(), [number](const auto& pair) { return pair.first == number; });
  return number > kSmallSize && known != replaced_.end() ? known->second : number;
}

Stack standInsOf(const OperatorHandle& op, c10::ArrayRef<IValue> arguments, const Likeness& likeness) {
  StandIns stand_ins{likeness};
  Stack stack;
  stack.reserve(arguments.size());
  for (const auto i : c10::irange(arguments.size())) {
    stack.push_back(stand_ins.of(arguments[i], op.schema().arguments()[i]));
  }
  return stack;
}

double countElements(c10::ArrayRef<IValue> arguments, int64_t divisor) {
  SizeScale scale{divisor};
  double count = 0;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    double elements = 1;
    for (const int64_t size : tensor.sizes()) {
      elements *= static_cast<double>(scale.of(size));
    }
    const bool is_spread = scale.keepsAll() && tensor.layout() == c10::kStrided;
    count += is_spread ? std::max(elements, extentOf(tensor)) : elements;
  });
  return count;
}

}  // namespace torchext
