#include "op_graph.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <typeinfo>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/TensorGeometry.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/pointer_numbers.h"
#include "../../../libraries/support/recently_shared.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../fake/calls/op_traits.h"
#include "../../fake/fake.h"
#include "../../hooks/hooks.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

namespace {

std::uint64_t nextNumber() {
  static std::atomic<std::uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Returns the Python number that `tensor` wraps, in one of the types that `c10::scalar_to_tensor` produces.
std::optional<c10::Scalar> wrappedNumber(const Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || isFake(tensor) || !tensor.is_cpu()) {
    return std::nullopt;
  }
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      return *tensor.const_data_ptr<double>();
    case c10::kLong:
      return *tensor.const_data_ptr<int64_t>();
    case c10::kBool:
      return *tensor.const_data_ptr<bool>();
    case c10::kComplexDouble:
      return *tensor.const_data_ptr<c10::complex<double>>();
    default:
      return std::nullopt;
  }
}

// Takes the place of tensors in recorded arguments.
const Tensor& placeholder() {
  static const Tensor tensor{c10::make_intrusive<c10::TensorImpl>(
      DispatchKeySet{DispatchKey::CPU}, caffe2::TypeMeta::Make<float>(), c10::Device{c10::kCPU})};
  return tensor;
}

bool isSameNumber(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;  // distinguishes zeros
}

bool areSameInts(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const c10::IValue& x, const c10::IValue& y) { return x.toInt() == y.toInt(); });
}

// Returns true if both are the same. May return false for arguments that are rarely the same.
bool isSameArgument(const c10::IValue& a, const c10::IValue& b) {
  return (a.isNone() && b.isNone()) || (a.isInt() && b.isInt() && a.toInt() == b.toInt()) ||
         (a.isBool() && b.isBool() && a.toBool() == b.toBool()) ||
         (a.isDouble() && b.isDouble() && isSameNumber(a.toDouble(), b.toDouble())) ||
         (a.isDevice() && b.isDevice() && a.toDevice() == b.toDevice()) ||
         (a.isTensor() && b.isTensor() && a.toTensor().is_same(b.toTensor())) ||
         (a.isIntList() && b.isIntList() && areSameInts(a.toListRef(), b.toListRef()));
}

// Returns the arguments of a call, shared with a recent call: layers of a model repeat them.
std::shared_ptr<const Stack> shared(Stack arguments) {
  thread_local RecentlyShared<Stack, 8> recent;
  // Others may keep memory alive.
  if (!std::all_of(arguments.begin(), arguments.end(), [](const auto& one) { return isSameArgument(one, one); })) {
    return std::make_shared<const Stack>(std::move(arguments));
  }
  const auto is_same = [&arguments](const Stack& known) {
    return std::equal(known.begin(), known.end(), arguments.begin(), arguments.end(), isSameArgument);
  };
  return recent.get(is_same, [&arguments] { return std::move(arguments); });
}

// Frees a chain of operators one after another. Each operator owns the values that it read, and these own the operators
// that wrote them, so plain destruction would recurse as deep as the program was long.
void release(std::shared_ptr<const OpNode> node) {
  thread_local std::vector<std::shared_ptr<const OpNode>>* pending = nullptr;
  if (node == nullptr) {
    return;
  }
  if (pending != nullptr) {
    pending->push_back(std::move(node));
    return;
  }
  std::vector<std::shared_ptr<const OpNode>> chain;
  pending = &chain;
  chain.push_back(std::move(node));
  while (!chain.empty()) {
    const std::shared_ptr<const OpNode> next = std::move(chain.back());
    chain.pop_back();
    // Destroying `next` here appends the operators that it alone kept alive to `chain`.
  }
  pending = nullptr;
}

}  // namespace

Geometry Geometry::of(const Tensor& tensor) {
  return {c10::DimVector(tensor.sizes()),
          c10::DimVector(tensor.strides()),
          tensor.storage_offset(),
          tensor.dtype(),
          tensor.is_conj(),
          tensor.is_neg(),
          tensor._is_zerotensor()};
}

SharedGeometry SharedGeometry::of(const Tensor& tensor) {
  thread_local RecentlyShared<Geometry, 8> recent;
  SharedGeometry geometry;
  geometry.shared_ = recent.get([&tensor](const Geometry& known) { return known.fits(tensor); },
                                [&tensor] { return Geometry::of(tensor); });
  return geometry;
}

bool Geometry::fits(const Tensor& tensor) const {
  return tensor.dtype() == dtype && tensor.sizes() == c10::IntArrayRef(sizes) &&
         tensor.strides() == c10::IntArrayRef(strides) && tensor.storage_offset() == storage_offset &&
         tensor.is_conj() == is_conj && tensor.is_neg() == is_neg && tensor._is_zerotensor() == is_zero;
}

bool Geometry::hasElements() const {
  return std::find(sizes.begin(), sizes.end(), 0) == sizes.end();
}

std::size_t Geometry::nbytes() const {
  return toSize(c10::multiply_integers(sizes)) * dtype.itemsize();
}

std::size_t Geometry::bytesReached() const {
  return at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize(), toSize(storage_offset));
}

bool Geometry::isContiguous() const {
  return at::geometry_is_contiguous(sizes, strides) && !is_conj && !is_neg && !is_zero;
}

Tensor Geometry::makeTensor(Storage storage) const {
  DispatchKeySet bits;
  if (is_conj) {
    bits = bits.add(DispatchKey::Conjugate);
  }
  if (is_neg) {
    bits = bits.add(DispatchKey::Negative);
  }
  if (is_zero) {
    bits = bits.add(DispatchKey::ZeroTensor);
  }
  return makeStridedTensor(std::move(storage), c10::typeMetaToScalarType(dtype), sizes, strides, storage_offset, bits);
}

Storage makeStorage(std::size_t nbytes, c10::Device device, bool is_pinned) {
  constexpr std::size_t kSmall = std::size_t{64} << 10U;
  const bool is_plain = device.is_cpu() && !is_pinned;
  if (is_plain && nbytes >= kSmall && hooks().make_memory) {
    return hooks().make_memory(nbytes);
  }
  if (is_plain && nbytes < kSmall && !at::globalContext().deterministicAlgorithms()) {
    c10::Allocator* const allocator = c10::GetCPUAllocator();  // as `at::empty()`, without the dispatcher
    return {c10::Storage::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator, /*resizable=*/true};
  }
  const auto options = at::TensorOptions().dtype(c10::kByte).device(device).pinned_memory(is_pinned);
  return at::empty({toSigned(nbytes)}, options).storage();
}

Tensor bytesAt(const c10::Storage& storage, std::size_t begin, std::size_t nbytes) {
  const Geometry bytes{{toSigned(nbytes)}, {1}, toSigned(begin), caffe2::TypeMeta::Make<std::uint8_t>(), false, false};
  return bytes.makeTensor(storage);
}

Tensor Geometry::makeEmptyTensor(c10::Device device) const {
  return makeTensor(makeStorage(bytesReached(), device));
}

StorageValue::StorageValue(std::shared_ptr<const OpNode> writer, std::size_t output, const Storage& storage)
    : writer_{std::move(writer)},
      output_{static_cast<std::uint32_t>(output)},
      device_{storage.device()},
      nbytes_{storage.nbytes()} {
  const WrittenStorage& written = writer_->written()[output_];
  // The placeholders of recorded arguments are on the CPU, so that copies without waiting do not count as pinned.
  is_pinned_ = written.is_argument ? writer_->tensors()[written.position].value->is_pinned_
                                   : isPinMemory(writer_->op()) || makesPinned(writer_->op(), writer_->arguments());
}

StorageValue::StorageValue(Storage constant)
    : device_{constant.device()}, nbytes_{constant.nbytes()}, constant_{std::move(constant)} {}

StorageValue::~StorageValue() {
  release(std::move(writer_));
}

Storage StorageValue::makeEmptyStorage() const {
  return makeStorage(nbytes_, device_, is_pinned_);
}

void StorageValue::fold(Storage constant) {
  checkHolds(LockRank::kReplay);
  constant_ = std::move(constant);
  computed_ = nullptr;
  release(std::exchange(writer_, nullptr));
}

bool isSameValue(const StorageValue& a, const StorageValue& b) {
  return &a == &b || (a.writer() != nullptr && a.writer() == b.writer() && a.output() == b.output());
}

StorageValuePtr valueOf(const Storage& storage) {
  std::shared_ptr<Provenance> provenance = provenanceOf(storage);
  // Faster than a dynamic cast. The class is final.
  const bool is_value = provenance != nullptr && typeid(*provenance) == typeid(StorageValue);
  return is_value ? std::static_pointer_cast<StorageValue>(std::move(provenance)) : nullptr;
}

StorageValuePtr valueOf(const at::TensorBase& tensor) {
  // NOTE [Sparse fakes]: they have no storage and are not recorded.
  return isFake(tensor) && tensor.has_storage() ? valueOf(tensor.storage()) : nullptr;
}

void setValue(const Storage& storage, StorageValuePtr value) {
  if (const StorageValuePtr before = valueOf(storage); before != value && before) {
    before->supersede();
  }
  setProvenance(storage, std::move(value), DispatchKeySet{DispatchKey::DeferredInit});
}

TensorArgument TensorArgument::of(const Tensor& tensor) {
  TensorArgument argument;
  argument.value = valueOf(tensor);
  if (argument.value != nullptr) {
    argument.shared_geometry = SharedGeometry::of(tensor);
    return argument;
  }
  if (const auto number = wrappedNumber(tensor)) {
    argument.number = std::make_unique<const c10::Scalar>(*number);
    return argument;
  }
  argument.external = std::make_shared<const ExternalTensor>(tensor);
  return argument;
}

TensorArgument TensorArgument::metadataOf(const Tensor& tensor) {
  TensorArgument argument;
  argument.shared_geometry = SharedGeometry::of(tensor);
  argument.device = tensor.device();
  return argument;
}

std::vector<Tensor> returnedTensors(c10::ArrayRef<c10::IValue> results) {
  std::vector<Tensor> tensors;
  for (const c10::IValue& result : results) {
    if (result.isTensorList()) {
      const std::vector<Tensor> list = result.toTensorVector();
      tensors.insert(tensors.end(), list.begin(), list.end());
    } else {
      tensors.push_back(result.isTensor() ? result.toTensor() : Tensor{});
    }
  }
  return tensors;
}

OpNode::OpNode(const c10::OperatorHandle& op, const Stack& stack)
    : number_{nextNumber()}, op_{op}, thread_state_{ThreadState::shared()} {
  if (std::string source = tracedSourceLine(); !source.empty()) {
    source_ = std::make_unique<const std::string>(std::move(source));
  }
  const auto count = op_.schema().arguments().size();
  Stack arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const bool reads_metadata_only = isFactory(op_, arguments);
  PointerNumbers distinct;
  c10::SmallVector<std::uint32_t, 8> first_positions;  // the position of the first argument with each number
  const auto take = [&](const Tensor& tensor) {
    tensors_.push_back(reads_metadata_only && tensor.layout() == c10::kStrided ? TensorArgument::metadataOf(tensor)
                                                                               : TensorArgument::of(tensor));
    if (tensors_.back().value != nullptr) {
      const auto [number, is_new] = distinct.add(tensor.unsafeGetTensorImpl());
      if (is_new) {
        first_positions.push_back(static_cast<std::uint32_t>(tensors_.size() - 1));
      } else {
        tensors_.back().same_as = first_positions[number];
      }
    }
    return placeholder();
  };
  mapTensors(arguments, count, take);
  arguments_ = shared(std::move(arguments));
}

OpNode::~OpNode() = default;

const WrittenStorage* OpNode::writtenTo(std::size_t tensor) const {
  const auto found = std::find_if(written_.begin(), written_.end(), [tensor](const WrittenStorage& storage) {
    return storage.is_argument && storage.position == tensor;
  });
  return found == written_.end() ? nullptr : &*found;
}

Stack OpNode::arguments(c10::ArrayRef<Tensor> tensors) const {
  Stack stack = *arguments_;
  std::size_t next = 0;
  const auto put = [&](const Tensor& /*placeholder*/) { return tensors[next++]; };
  mapTensors(stack, stack.size(), put);
  return stack;
}

std::size_t OpNode::addWritten(WrittenStorage written) {
  written_.push_back(std::move(written));
  return written_.size() - 1;
}

}  // namespace torchext
