#include "external_tensor.h"

#include <cstdint>

#include <ATen/ops/clone.h>

#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/sizes.h"
#include "../../fake/fake.h"
#include "../../hooks/hooks.h"
#include "../state/real_dispatch.h"
#include "op_graph.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::Storage;

namespace {

// Returns true if the tensor has values in memory that can be read here and that other code may change.
bool showsMemory(const Tensor& tensor) {
  return !isFake(tensor) && !tensor.is_meta() && !tensor._is_zerotensor() && !tensor.key_set().has(DispatchKey::Python);
}

// The byte range of a plain tensor, from its first to its last element.
struct Span {
  explicit Span(const Tensor& tensor)
      : begin{toSize(tensor.storage_offset()) * tensor.itemsize()},
        nbytes{tensor.numel() == 0 ? 0 : neededBytes(tensor) - begin} {}

  std::size_t begin;
  std::size_t nbytes;
};

// Returns a storage that holds `bytes` from `offset` on.
Storage storageOf(const Tensor& bytes, std::size_t offset) {
  if (hooks().external_values.copyOf) {
    return hooks().external_values.copyOf(bytes, offset);
  }
  Storage copy = makeStorage(offset + bytes.nbytes(), bytes.device());
  bytesAt(copy, offset, bytes.nbytes()).copy_(bytes);
  return copy;
}

// Kernels may round differently depending on the alignment of their operands, so the copy keeps the alignment.
std::size_t alignmentOffset(const Tensor& tensor) {
  constexpr std::size_t kAlignment = 64;  // of the CPU allocator's blocks
  const std::size_t offset =
      tensor.is_cpu() ? reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment : 0;
  return offset % tensor.itemsize() == 0 ? offset : 0;
}

// Keeps the strides, including gaps: results may depend on them.
Tensor copyOf(const Tensor& tensor, const Span& span) {
  const RealDispatch guard;
  const std::size_t offset = alignmentOffset(tensor);
  Geometry geometry = Geometry::of(tensor);
  geometry.storage_offset = toSigned(offset / tensor.itemsize());
  return geometry.makeTensor(storageOf(bytesAt(tensor.storage(), span.begin, span.nbytes), offset));
}

Tensor cloneOf(const Tensor& tensor) {
  const RealDispatch guard;
  return tensor.clone();
}

// Shares the version counter, but keeps no autograd graph alive and is unaffected by changes of metadata.
Tensor aliasOf(const Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return Tensor{impl.shallow_copy_and_detach(impl.version_counter(), /*allow_tensor_metadata_change=*/true)};
}

// A wrapper has a storage without memory.
bool hasMemory(const Tensor& tensor) {
  return isPlain(tensor) && holdsItsElements(tensor) &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

// Returns a tensor with the memory of `tensor`, but without its handlers.
Tensor memoryOf(const Tensor& tensor) {
  return Geometry::of(tensor).makeTensor(tensor.storage());
}

}  // namespace

ExternalTensor::ExternalTensor(const Tensor& tensor) {
  if (!showsMemory(tensor)) {
    const bool has_handler = tensor.key_set().has(DispatchKey::Python);
    tensor_ = has_handler ? tensor : aliasOf(tensor);
    if (has_handler && hasMemory(tensor) && hooks().external_values.watch) {
      is_unchanged_ = hooks().external_values.watch(memoryOf(tensor));
    } else if (has_handler && !tensor.is_inference()) {
      version_ = tensor._version();
    }
  } else if (!isPlain(tensor)) {
    tensor_ = cloneOf(tensor);
  } else {
    TORCH_CHECK(holdsItsElements(tensor), "A real tensor of shape ", tensor.sizes(),
                " is read by a recorded operator, but its storage has only ", tensor.storage().nbytes(),
                " bytes: its memory has been freed. Read it before it is freed.");
    const Span span{tensor};
    if (span.nbytes <= kMaxCopiedBytes || !hooks().external_values.watch) {
      tensor_ = copyOf(tensor, span);
    } else {
      tensor_ = aliasOf(tensor);
      is_unchanged_ = hooks().external_values.watch(memoryOf(tensor_));
    }
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor_.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

void ExternalTensor::check(const c10::OperatorName& op) const {
  TORCH_CHECK(
      !isFake(tensor_), "`", op, "` was recorded with a fake tensor of shape ", tensor_.sizes(),
      " that was not constructed by deferred_init, so its result cannot be computed. Construct that tensor inside "
      "deferred_init, or make it real before it is used.");
  const auto check_unchanged = [&](bool is_unchanged) {
    TORCH_CHECK(is_unchanged, "`", op, "` was recorded with a real tensor of shape ", tensor_.sizes(),
                " that has been changed in place since, so the recorded result cannot be computed any more. "
                "Materialize before changing the tensor, or pass `tensor.clone()` to the operator.");
  };
  check_unchanged(!version_ || tensor_._version() == *version_);
  if (!is_unchanged_) {
    return;
  }
  TORCH_CHECK(holdsItsElements(tensor_), "`", op, "` was recorded with a real tensor of shape ", tensor_.sizes(),
              " whose memory has been freed since, so the recorded result cannot be computed any more. Materialize "
              "before freeing it, or pass `tensor.clone()` to the operator.");
  check_unchanged(is_unchanged_());
}

}  // namespace torchext
