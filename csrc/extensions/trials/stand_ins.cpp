#include "stand_ins.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/fill_ops.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/meta/recipe_builder.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/included_key.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../support/kernel_threads.h"
#include "trials.h"

namespace torchext {

using c10::ScalarType;
using c10::Storage;

namespace {

// The stand-ins of tensors on a larger storage do not share a storage. Each gets one that is just large enough.
constexpr std::size_t kSmallStorage = std::size_t{1} << 16U;

ScalarType dtypeOf(ScalarType dtype, Dtypes dtypes) {
  if (dtypes == Dtypes::kFloat || (dtypes == Dtypes::kWide && c10::isReducedFloatingType(dtype))) {
    return ScalarType::Float;
  }
  if (dtypes != Dtypes::kCommon || dtype == ScalarType::Bool) {
    return dtype;
  }
  return c10::isIntegralType(dtype, /*includeBool=*/false) ? ScalarType::Long : ScalarType::Float;
}

// Writes ones to these elements of the storage of `tensor`, which may be expanded. Other dtypes are unused in
// computations: for complex numbers of bfloat16, which PyTorch 2.15 has, `fill_` has no kernel.
void writeOnes(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t storage_offset) {
  const ScalarType dtype = tensor.scalar_type();
  const bool is_integral = c10::isIntegralType(dtype, /*includeBool=*/true) && !c10::isBarebonesUnsignedType(dtype);
  const bool is_floating = c10::isFloatingType(dtype) && dtype != ScalarType::Float4_e2m1fn_x2;
  const bool is_complex = c10::isComplexType(dtype) && c10::toRealValueType(dtype) != ScalarType::BFloat16;
  if (is_integral || is_floating || is_complex) {
    const KernelsOnly guard;
    const OneThread one_thread{true};
    Tensor elements = makeStridedTensor(tensor.storage(), dtype, sizes, strides, storage_offset, {});
    at::_ops::fill__Scalar::redispatch(KernelsOnly::kCpu, elements, 1);
  }
}

void fill(const Tensor& tensor, Fill fill) {
  const bool has_fraction = c10::isFloatingType(tensor.scalar_type()) || c10::isComplexType(tensor.scalar_type());
  if (fill == Fill::kZeros || (fill == Fill::kIdentity && !has_fraction)) {
    return;
  }
  if (fill == Fill::kOnes || tensor.dim() < 2) {
    writeOnes(tensor, {toSigned(tensor.storage().nbytes() / tensor.itemsize())}, {1}, 0);
    return;
  }
  // The diagonals of all matrices.
  c10::DimVector sizes(tensor.sizes());
  c10::DimVector strides(tensor.strides());
  sizes.pop_back();
  strides.pop_back();
  sizes.back() = std::min(tensor.size(-1), tensor.size(-2));
  strides.back() += tensor.stride(-1);
  writeOnes(tensor, sizes, strides, tensor.storage_offset());
}

// Copies `value`, which has the strides of `tensor`. Expanded dimensions cannot be written, so only their first element
// is.
void copyElements(Tensor tensor, Tensor value) {
  for (const auto dim : c10::irange(tensor.dim())) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
      value = value.narrow(dim, 0, 1);
    }
  }
  tensor.copy_(value);
}

// Returns strides for smaller sizes that compare like those of `tensor`. Equal ones stay equal (the sizes then
// determine the order of their dimensions), gaps and overlaps stay, and expanded dimensions stay expanded.
c10::DimVector smallerStrides(const Tensor& tensor, c10::IntArrayRef smaller) {
  const c10::IntArrayRef sizes = tensor.sizes();
  const c10::IntArrayRef strides = tensor.strides();
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  c10::DimVector result(sizes.size(), 0);
  int64_t last = 0;   // the stride of the previous dimensions
  int64_t dense = 1;  // the next stride if there is neither a gap nor an overlap
  int64_t smaller_last = 0;
  int64_t smaller_dense = 1;
  for (const std::size_t dim : order) {
    if (strides[dim] > last) {
      last = strides[dim];
      smaller_last = last == dense  ? smaller_dense
                     : last > dense ? std::max(smaller_dense, smaller_last) + 1
                                    : smaller_last + 1;
    }
    result[dim] = smaller_last;
    dense = std::max(dense, last * std::max<int64_t>(sizes[dim], 1));
    smaller_dense = std::max(smaller_dense, smaller_last * std::max<int64_t>(smaller[dim], 1));
  }
  return result;
}

// Returns true for an argument of type `SymInt`, like declared sizes, or `int[]`, like the sizes of pooling kernels.
// Other integers are dimensions, dtypes or bounds of values.
bool mayBeSize(const c10::Argument& argument) {
  const auto optional = argument.real_type()->cast<c10::OptionalType>();
  const auto& type = optional ? optional->getElementType() : argument.real_type();
  if (const auto list = type->cast<c10::ListType>()) {
    const auto kind = list->getElementType()->kind();
    return kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType;
  }
  return type->kind() == c10::TypeKind::SymIntType;
}

class StandIns {
 public:
  StandIns(const OperatorHandle& op, const Likeness& likeness, Substitution& pairs)
      : likeness_{likeness},
        trusts_indices_{trustOf(op) == Trust::kIndices || trustOf(op) == Trust::kSegments},
        stand_ins_{pairs} {}

  IValue of(const IValue& value, const c10::Argument& argument) {
    if (isGenerator(argument)) {
      const bool is_replaced = likeness_.is_whole || value.isNone() || value.toGenerator().device().is_cpu();
      return is_replaced ? IValue{at::detail::createCPUGenerator()} : value;
    }
    if (value.isDevice()) {
      return c10::Device{c10::kCPU};
    }
    if (value.isBool() && argument.name() == "pin_memory") {
      // Without an accelerator, the kernel must refuse to pin. A fake accelerator has no allocator for pinned memory.
      return value.toBool() && fakeCudaDeviceCount() == 0;
    }
    if (mayBeSize(argument) && value.isInt()) {
      return likeness_.scale.of(value.toInt());
    }
    if (mayBeSize(argument) && value.isIntList()) {
      std::vector<int64_t> numbers = value.toIntVector();
      std::transform(numbers.begin(), numbers.end(), numbers.begin(),
                     [this](int64_t number) { return likeness_.scale.of(number); });
      return numbers;
    }
    return mapTensors(value, [&](const Tensor& tensor) { return of(tensor, fillFor(tensor, argument)); });
  }

  Tensor of(const Tensor& tensor, Fill fill_with) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return realNumber(tensor);
    }
    if (const Tensor* known = stand_ins_.substituteOf(tensor)) {
      return *known;
    }
    Tensor stand_in;
    if (const Tensor* same = findSameData(tensor)) {
      const Tensor& other = *stand_ins_.substituteOf(*same);
      stand_in = makeStridedTensor(other.storage(), other.scalar_type(), other.sizes(), other.strides(),
                                   other.storage_offset(), other.key_set() & kLazyBits);
    } else {
      stand_in = make(tensor);
      setValues(tensor, stand_in, fill_with);
    }
    stand_ins_.add(tensor, stand_in);
    return stand_in;
  }

 private:
  // Returns an earlier argument with the same data, or null. With distinct stand-ins, kernels could refuse calls that
  // do nothing, such as `copy_` of a tensor to itself.
  const Tensor* findSameData(const Tensor& tensor) const {
    const auto& originals = stand_ins_.originals();
    const auto same = std::find_if(originals.begin(), originals.end(), [&tensor](const Tensor& other) {
      return isSameStorage(tensor.storage(), other.storage()) && tensor.storage_offset() == other.storage_offset() &&
             tensor.sizes().equals(other.sizes()) && tensor.strides().equals(other.strides()) &&
             tensor.scalar_type() == other.scalar_type() &&
             (tensor.key_set() & kLazyBits) == (other.key_set() & kLazyBits);
    });
    return same == originals.end() ? nullptr : &*same;
  }

  Tensor make(const Tensor& tensor) {
    const ScalarType dtype = dtypeFor(tensor);
    if (!likeness_.scale.keepsAll()) {
      c10::DimVector sizes(tensor.sizes());
      std::transform(sizes.begin(), sizes.end(), sizes.begin(),
                     [this](int64_t size) { return likeness_.scale.of(size); });
      return makeAlone(tensor, sizes, smallerStrides(tensor, sizes));
    }
    const bool is_shared = likeness_.is_whole || tensor.storage().nbytes() <= kSmallStorage;
    if (dtype != tensor.scalar_type() || !is_shared || !holdsItsElements(tensor)) {
      return makeAlone(tensor, tensor.sizes(), tensor.strides());
    }
    return makeStridedTensor(storageOf(tensor.storage()), dtype, tensor.sizes(), tensor.strides(),
                             tensor.storage_offset(), tensor.key_set() & kLazyBits);
  }

  Tensor makeAlone(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) const {
    const ScalarType dtype = dtypeFor(tensor);
    Storage storage = makeZeroStorage(at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype)));
    return makeStridedTensor(std::move(storage), dtype, sizes, strides, /*storage_offset=*/0,
                             tensor.key_set() & kLazyBits);
  }

  // Called for the next stand-in.
  ScalarType dtypeFor(const Tensor& tensor) const {
    const std::size_t number = stand_ins_.originals().size();
    const bool is_changed = likeness_.only.value_or(number) == number;
    return is_changed ? dtypeOf(tensor.scalar_type(), likeness_.dtypes) : tensor.scalar_type();
  }

  Storage storageOf(const Storage& storage) {
    if (const Storage* known = stand_ins_.substituteOf(storage)) {
      return *known;
    }
    Storage zeros = makeZeroStorage(storage.nbytes());
    stand_ins_.add(storage, zeros);
    return zeros;
  }

  void setValues(const Tensor& tensor, const Tensor& stand_in, Fill fill_with) const {
    if (likeness_.known == nullptr) {
      fill(stand_in, fill_with);
    } else if (const Tensor value = (*likeness_.known)(tensor); value.defined()) {
      copyElements(stand_in, value);
    } else if (stand_in.storage().nbytes() <= kSmallStorage) {
      fill(stand_in, fill_with);
    }
  }

  Fill fillFor(const Tensor& tensor, const c10::Argument& argument) const {
    if (argument.name().find("pivots") != std::string::npos) {
      return Fill::kOnes;  // LAPACK counts pivots from 1, does not check them, and would write anywhere
    }
    return trusts_indices_ && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) ? Fill::kZeros
                                                                                               : likeness_.fill;
  }

  const Likeness& likeness_;
  const bool trusts_indices_;
  Substitution& stand_ins_;
};

// Returns the number of elements from the first to the last one of `tensor`, inclusive: a column of a matrix needs
// nearly all of its memory.
double extentOf(const Tensor& tensor) {
  double extent = 1;
  for (const auto i : c10::irange(tensor.dim())) {
    extent += static_cast<double>(tensor.size(i) - 1) * static_cast<double>(tensor.stride(i));
  }
  return tensor.numel() == 0 ? 0 : extent;
}

// Returns true for the flag with which an operator of `Trust::kSegments` does not check its lengths, if these are
// unknown: no fill adds up to the size that it would expect. It then reads a row of lengths for each row of the data,
// and refuses other sizes by its checks.
bool skipsChecks(const OperatorHandle& op,
                 const c10::Argument& argument,
                 ArrayRef<IValue> arguments,
                 const Likeness& likeness) {
  if (trustOf(op) != Trust::kSegments || argument.name() != "unsafe") {
    return false;
  }
  const Tensor& data = arguments.front().toTensor();
  return !hasTensor(arguments.slice(1), [&](const Tensor& lengths) {
    const bool is_known = likeness.known != nullptr && (*likeness.known)(lengths).defined();
    const bool is_shaped = lengths.dim() > 0 && lengths.dim() <= data.dim() && lengths.numel() > 0;
    const auto rows = toSize(is_shaped ? lengths.dim() - 1 : 0);
    return is_known || !is_shaped || data.sizes().slice(0, rows) != lengths.sizes().slice(0, rows);
  });
}

}  // namespace

Stack standInsOf(const OperatorHandle& op,
                 c10::ArrayRef<IValue> arguments,
                 const Likeness& likeness,
                 Substitution& pairs) {
  StandIns stand_ins{op, likeness, pairs};
  Stack stack;
  stack.reserve(arguments.size());
  for (const auto i : c10::irange(arguments.size())) {
    const c10::Argument& argument = op.schema().arguments()[i];
    stack.push_back(skipsChecks(op, argument, arguments, likeness) ? IValue{true}
                                                                   : stand_ins.of(arguments[i], argument));
  }
  return stack;
}

double countElements(c10::ArrayRef<IValue> values, const SizeScale& scale) {
  double count = 0;
  forEachTensor(values, [&](const Tensor& tensor) {
    double elements = 1;
    for (const int64_t size : tensor.sizes()) {
      elements *= static_cast<double>(scale.of(size));
    }
    const bool is_spread = scale.keepsAll() && tensor.layout() == c10::kStrided;
    count += is_spread ? std::max(elements, extentOf(tensor)) : elements;
  });
  return count;
}

// NOTE [Smaller calls]
//
// A call that is too large for a trial is tried out with smaller numbers. It must pass, fail and lay out its results as
// the original call does, so the numbers keep their relations:
//
//   * Equal numbers stay equal, and a larger number stays larger: a size of 128 and an `output_size` of 64 must not
//     both become 64. Also, of two dimensions with equal strides, the shorter one counts as the inner one
//     (`TensorIteratorBase::reorder_dimensions()`).
//   * A multiple of another number stays a multiple, and other numbers do not become multiples.
//   * Even numbers stay even.
//   * Numbers with a small difference keep it, and others differ by more: a diagonal of 209 elements fits into a matrix
//     of 211, from `offset=2` on, and one of 183 does not.
//
// Dividing all large sizes by a power of two also keeps sums and products, so it is tried first. Otherwise each large
// number becomes the smallest one that has these relations to those before it. Sums and products are lost then, and a
// call that fails for that reason is tried out at its own size.
namespace {

using Images = std::map<int64_t, int64_t>;

// Numbers up to this one may be dimensions.
constexpr int64_t kLeastKept = 8;

// Numbers up to this one stay unchanged where other numbers are divided, unless they can be divided.
constexpr int64_t kSmallSize = 64;

// Images are at least this large, which leaves room for kernels of the usual sizes.
constexpr int64_t kLeastImage = 17;

// Numbers that differ by at most this keep their difference. The images of others differ by more.
constexpr int64_t kNear = 8;

constexpr int64_t kMostTried = 4096;

bool isMultiple(int64_t number, int64_t factor) {
  return number % factor == 0;
}

// `number` must be larger than all numbers in `images`.
bool keepsRelations(const Images& images, int64_t number, int64_t image) {
  return (images.empty() || image > images.rbegin()->second) && isMultiple(number, 2) == isMultiple(image, 2) &&
         std::all_of(images.begin(), images.end(), [&](const auto& smaller) {
           const int64_t difference = number - smaller.first;
           const int64_t difference_of_images = image - smaller.second;
           const bool keeps_distance =
               difference <= kNear ? difference_of_images == difference : difference_of_images > kNear;
           return keeps_distance &&
                  (smaller.first < 2 || isMultiple(number, smaller.first) == isMultiple(image, smaller.second));
         });
}

// Returns `number` itself if no smaller number has the same relations.
int64_t smallestLike(const Images& images, int64_t number, int64_t least) {
  const int64_t first = images.empty() ? least : std::max(least, images.rbegin()->second + 1);
  const int64_t end = std::min(number, first + kMostTried);
  for (int64_t image = first; image < end; ++image) {
    if (keepsRelations(images, number, image)) {
      return image;
    }
  }
  return number;
}

// Divides multiples of `divisor`, and replaces other large numbers. Returns nothing if a relation would change.
std::optional<SizeScale> dividing(const std::set<int64_t>& numbers, int64_t divisor) {
  Images images;
  for (const int64_t number : numbers) {
    int64_t image = number;
    if (number > kLeastKept && isMultiple(number, divisor) && number / divisor >= 2) {
      image = number / divisor;
    } else if (number > kSmallSize) {
      image = smallestLike(images, number, kLeastImage);
    }
    if (!keepsRelations(images, number, image)) {
      return std::nullopt;
    }
    images[number] = image;
  }
  return SizeScale{std::move(images)};
}

// Replaces the numbers that are larger than `kept`.
SizeScale compressing(const std::set<int64_t>& numbers, int64_t kept) {
  Images images;
  for (const int64_t number : numbers) {
    images[number] = number <= kept ? number : smallestLike(images, number, std::min(kept + 1, kLeastImage));
  }
  return SizeScale{std::move(images)};
}

// Returns the numbers of a call that smaller stand-ins may replace: the sizes of its arguments and results, and the
// arguments that may be sizes.
std::set<int64_t> numbersOf(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  std::set<int64_t> numbers;
  const auto add = [&numbers](c10::IntArrayRef more) {
    std::copy_if(more.begin(), more.end(), std::inserter(numbers, numbers.end()), [](int64_t one) { return one > 0; });
  };
  const auto add_sizes = [&add](const Tensor& tensor) { add(tensor.sizes()); };
  forEachTensor(arguments, add_sizes);
  forEachTensor(results, add_sizes);
  for (const auto i : c10::irange(arguments.size())) {
    const bool may_be_size = mayBeSize(op.schema().arguments()[i]);
    if (may_be_size && arguments[i].isInt()) {
      add(arguments[i].toInt());
    } else if (may_be_size && arguments[i].isIntList()) {
      add(arguments[i].toIntVector());
    }
  }
  return numbers;
}

}  // namespace

SizeScale scaleFor(const OperatorHandle& op,
                   ArrayRef<IValue> arguments,
                   ArrayRef<IValue> results,
                   double max_elements) {
  const std::set<int64_t> numbers = numbersOf(op, arguments, results);
  const auto is_small = [&](const SizeScale& scale) {
    return countElements(arguments, scale) + countElements(results, scale) <= max_elements;
  };
  for (int64_t divisor = 2; !numbers.empty() && divisor <= *numbers.rbegin() / 2; divisor *= 2) {
    const auto scale = dividing(numbers, divisor);
    if (scale && is_small(*scale)) {
      return *scale;
    }
  }
  for (const int64_t kept : {64, 32, 16}) {
    const SizeScale scale = compressing(numbers, kept);
    if (is_small(scale)) {
      return scale;
    }
  }
  return compressing(numbers, kLeastKept);
}

}  // namespace torchext
