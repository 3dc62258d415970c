#include "composites.h"

#include <optional>
#include <tuple>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <c10/core/GradMode.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../trials/refusals.h"
#include "composite_kernels.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

Tensor maxPool1dWithIndices(const Tensor& self,
                            c10::IntArrayRef kernel_size,
                            c10::IntArrayRef stride,
                            c10::IntArrayRef padding,
                            c10::IntArrayRef dilation,
                            bool ceil_mode) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d", "");
  try {
    return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
  } catch (const c10::Error&) {
    const Stack arguments{self, kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
    tryOut(TrialReason::kMetaKernelRefuses, op, arguments, {});  // the composite kernel may have another message
    throw;
  }
}

// The condition of `max_pool1d()` (MaxPooling.cpp).
bool readsMemory(const Tensor& self) {
  const bool needs_gradient = self.requires_grad() && c10::GradMode::is_enabled();
  return self.is_cpu() && !needs_gradient && !self._fw_grad(/*level=*/0).defined() && !at::isTensorSubclassLike(self);
}

// If the composite kernel reads the memory of its argument, autograd does not record the computation. The operator that
// it calls otherwise returns the same values, but as a view.
Tensor maxPool1d(const Tensor& self,
                 c10::IntArrayRef kernel_size,
                 c10::IntArrayRef stride,
                 c10::IntArrayRef padding,
                 c10::IntArrayRef dilation,
                 bool ceil_mode) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> untracked;
  if (readsMemory(self)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(self.scalar_type(), /*includeBool=*/true),
                                "\"max_pool1d_impl\" not implemented for '", self.scalar_type(), "'");
    untracked.emplace();
  }
  return maxPool1dWithIndices(self, kernel_size, stride, padding, dilation, ceil_mode);
}

// The kernels compare the address of the memory with those of the allocator for pinned memory. A fake has no memory:
// its storage records that it is pinned.
void isPinnedKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor& self = argumentsOf(op, *stack)[0].toTensor();
  const bool is_pinned = isFake(self) && self.has_storage() && isPinnedStorage(self.storage());
  op.redispatchBoxed(keys & kBelowComposites, stack);
  stack->back() = is_pinned || stack->back().toBool();
}

// `record_stream` only has a CUDA kernel, which looks up the block of the caching allocator by its address.
void recordStream(Tensor& self, c10::Stream stream) {  // NOLINT(google-runtime-references): the schema's
  if (MemoryCounter* counter = memoryCounter()) {
    counter->recordStream(self.storage(), stream.id());
  }
}

// Returns the kernel that attention would choose. The kernels below choose by the device of their arguments and read no
// memory, so they receive the fakes. Meta shadows do not have the claimed device.
void sdpChoiceKernel(const OperatorHandle& op, DispatchKeySet /*keys*/, Stack* stack) {
  const Tensor& query = argumentsOf(op, *stack)[0].toTensor();
  op.redispatchBoxed(DispatchKeySet{query.is_cpu() ? DispatchKey::CPU : DispatchKey::Meta}, stack);
}

// `torch.nn.TransformerEncoder` calls one to decide whether to drop masked elements with a nested tensor, which
// has no fakes; otherwise it computes results of the same shape with the mask. Recurrent networks ask whether cuDNN is
// acceptable before they compare addresses of weights with those of its buffer (ATen's `try_get_weight_buf()`);
// PyTorch's own kernels are used instead, as on fake devices.
void falseForFakesKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (hasTensor(argumentsOf(op, *stack), isUndeferredFake)) {
    replaceArguments(op, *stack, false);
    return;
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

}  // namespace

bool isUndeferredFake(const Tensor& tensor) {
  return isFake(tensor) && !tensor.key_set().has(DispatchKey::DeferredInit);
}

void replaceArguments(const OperatorHandle& op, Stack& stack, bool answer) {
  torch::jit::drop(stack, op.schema().arguments().size());
  torch::jit::push(stack, answer);
}

void registerComposites(torch::Library& library) {
  library.impl("max_pool1d", &maxPool1d);
  library.impl("record_stream", &recordStream);
  implement<&isPinnedKernel>(library, {"is_pinned"});
  implement<&sdpChoiceKernel>(library, {"_fused_sdp_choice"});
  implement<&falseForFakesKernel>(library, {"cudnn_is_acceptable", "_nested_tensor_from_mask_left_aligned"});
  registerValueReaders(library);
  registerSpecialValues(library);
  registerSparseConstructors(library);
  registerAllocations(library);
}

}  // namespace torchext
