#include "op_graph.h"

#include <atomic>
#include <utility>

#include <c10/core/TensorImpl.h>

#include "../fake/fake.h"
#include "../stack_utils.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using torch::jit::Stack;

namespace {

std::uint64_t nextNumber() {
  static std::atomic<std::uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Stands in recorded arguments where a tensor was.
const Tensor& placeholder() {
  static const Tensor tensor{c10::make_intrusive<c10::TensorImpl>(
      DispatchKeySet{DispatchKey::CPU}, caffe2::TypeMeta::Make<float>(), c10::Device{c10::kCPU})};
  return tensor;
}

// Frees a chain of operators one after another. Each owns the values that it read and those own the operators that
// wrote them, so that plain destruction would recurse as deep as the program was long.
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
    // Destroying `next` here appends to `chain` what it alone kept alive.
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
          tensor.is_neg()};
}

bool Geometry::fits(const Tensor& tensor) const {
  return tensor.dtype() == dtype && tensor.sizes() == c10::IntArrayRef(sizes) &&
         tensor.strides() == c10::IntArrayRef(strides) && tensor.storage_offset() == storage_offset &&
         tensor.is_conj() == is_conj && tensor.is_neg() == is_neg;
}

Tensor Geometry::makeTensor(Storage storage) const {
  DispatchKeySet keys{c10::computeDispatchKey(c10::typeMetaToScalarType(dtype), c10::kStrided, storage.device())};
  if (is_conj) {
    keys = keys.add(DispatchKey::Conjugate);
  }
  if (is_neg) {
    keys = keys.add(DispatchKey::Negative);
  }
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides, storage_offset);
  return Tensor{std::move(impl)};
}

StorageValue::StorageValue(std::shared_ptr<const OpNode> writer, std::size_t output)
    : writer_{std::move(writer)}, output_{output} {}

StorageValue::StorageValue(Storage constant) : constant_{std::move(constant)} {}

StorageValue::~StorageValue() {
  release(std::move(writer_));
}

void StorageValue::fold(Storage constant) {
  constant_ = std::move(constant);
  release(std::exchange(writer_, nullptr));
}

StorageValuePtr valueOf(const at::TensorBase& tensor) {
  return isFake(tensor) ? std::dynamic_pointer_cast<StorageValue>(provenanceOf(tensor.storage())) : nullptr;
}

TensorArgument TensorArgument::of(const Tensor& tensor) {
  TensorArgument argument;
  argument.value = valueOf(tensor);
  if (argument.value != nullptr) {
    argument.geometry = Geometry::of(tensor);
  } else {
    argument.external = tensor;
    argument.external_version = tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
  }
  return argument;
}

OpNode::OpNode(c10::OperatorHandle op, const Stack& stack)
    : number_{nextNumber()}, op_{op}, thread_state_{ThreadState::current()} {
  const auto count = op_.schema().arguments().size();
  arguments_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const auto take = [this](const Tensor& tensor) {
    tensors_.push_back(TensorArgument::of(tensor));
    return placeholder();
  };
  mapTensors(arguments_, count, take);
}

OpNode::~OpNode() = default;

Stack OpNode::arguments(c10::ArrayRef<Tensor> tensors) const {
  Stack stack = arguments_;
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
