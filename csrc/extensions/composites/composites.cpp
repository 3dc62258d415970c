#include "composites.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/resize_ops.h>
#include <c10/core/GradMode.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/fake.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../support/autograd.h"
#include "../support/registrations.h"
#include "gradient_formulas.h"
#include "versions.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

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
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d", "");
  std::optional<at::AutoDispatchBelowADInplaceOrView> untracked;
  if (readsMemory(self)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(self.scalar_type(), /*includeBool=*/true),
                                "\"max_pool1d_impl\" not implemented for '", self.scalar_type(), "'");
    untracked.emplace();
  }
  try {
    return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
  } catch (const c10::Error&) {
    const Stack arguments{self, kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
    // The composite kernel may have another message.
    hooks().trials.tryOut(TrialReason::kMetaKernelRefuses, op, arguments, {});
    throw;
  }
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

// Returns true for the kernels of `empty()`, `rand()` and similar factories (TensorFactories.cpp), which call the
// operator `resize_`. Without autograd's keys, as in inference mode, the call passes PyTorch's fallbacks before it
// reaches the kernel.
bool resizesByOperator(const OperatorHandle& op, DispatchKeySet keys) {
  return (op.hasTag(at::Tag::nondeterministic_seeded) || op.schema().name() == "aten::empty") &&
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         keys.has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
}

void callWithResizableOutputs(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  std::optional<ResizableOutputs> outputs;
  if (!resizesByOperator(op, keys)) {
    outputs.emplace(op, *stack);
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// `at::native::resize_output()` bypasses the kernels that refuse tensors with gradients and count versions.
const Tensor& resizeOutput(DispatchKeySet keys,
                           const Tensor& self,
                           c10::SymIntArrayRef size,
                           std::optional<c10::MemoryFormat> format) {
  const DispatchKeySet kept =
      ResizableOutputs::isOne(self) ? keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView : keys;
  return at::_ops::resize_::redispatch(kept & kBelowComposites, self, size, format);
}

// The composite kernel prints the values of a tensor that it refuses.
void meshgridKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  forEachTensor(argumentsOf(op, *stack), [](const Tensor& tensor) {
    TORCH_CHECK(!isUndeferredFake(tensor) || tensor.dim() <= 1,
                "torch.meshgrid: Expected 0D or 1D tensor in the tensor list but got: [ ", tensor.toString(), "{",
                c10::Join(",", tensor.sizes()), "} ]");
  });
  allocatingKernel(op, keys, stack);
}

// Returns true for composite operators that may allocate a tensor and write to it, as opposed to making views.
bool mayAllocate(const OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return compositeKernelOf(op) && !onlyMakesViews(op) && std::any_of(returns.begin(), returns.end(), isOfTensors);
}

// Registers `kKernel` for the operators of `aten` for which `is_wanted` returns true and that have no kernel yet.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kKernel>
void registerWhere(torch::Library& library, bool (*is_wanted)(const OperatorHandle&)) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && namespaceOf(name) == "aten" && !op->hasKernelForDispatchKey(kCompositesKey) && is_wanted(*op)) {
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<kKernel>());
    }
  }
}

// PyTorch's kernels for views of zeros without memory make plain aliases, and since 2.15 refuse fakes of other
// libraries (`maybe_copy_fake_tensor_metadata()`). Without their key, the handler of fakes makes these views.
void viewZerosKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const bool is_fake = isFake(argumentsOf(op, *stack)[0].toTensor());
  const DispatchKeySet passed{is_fake ? DispatchKey::ZeroTensor : DispatchKey::Undefined};
  op.redispatchBoxed((keys & kBelowComposites) - passed, stack);
}

bool viewsZeros(const OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::ZeroTensor) && onlyMakesViews(op);
}

// Prepares operators for fakes with lazy bits, which are rare.
//
//   * NOTE [Zeros of forward AD]: PyTorch's kernels for such zeros allocate their results with a factory
//     (`mul_zerotensor()` in BinaryOps.cpp). This makes these results fake, also outside of fake_mode(). Elementwise
//     calls on fakes then take a few tenths of a microsecond longer.
//   * Most operators do not handle the negative and the conjugate bit. For them, PyTorch's fallback
//     (MathBitsFallback.h) passes a clone of an `out` with such a bit, and then resizes the `out` without the
//     dispatcher. This makes such outputs resizable, for all operators of `aten`: it registers 900 kernels.
void prepareForBits(DispatchKeySet bits) {
  if (bits.has_any(DispatchKeySet{DispatchKey::Conjugate} | DispatchKeySet{DispatchKey::Negative})) {
    [[maybe_unused]] static const bool is_done = [] {
      registerWhere<&callWithResizableOutputs>(permanentLibrary(kCompositesKey), &ResizableOutputs::existFor);
      return true;
    }();
  }
  if (bits.has(DispatchKey::ZeroTensor)) {
    [[maybe_unused]] static const bool is_done = [] {
      torch::Library& library = permanentLibrary(kCompositesKey);
      registerWhere<&viewZerosKernel>(library, &viewsZeros);
      implement<&allocatingKernel>(library, {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "linalg_cross"});
      return true;
    }();
  }
}

void registerKernels(torch::Library& library) {
  registerValueShortcuts(library);
  registerValueReaders(library);
  library.impl("max_pool1d", &maxPool1d);
  library.impl("record_stream", &recordStream);
  library.impl("resize_", &resizeOutput);
  implement<&isPinnedKernel>(library, {"is_pinned"});
  implement<&sdpChoiceKernel>(library, {"_fused_sdp_choice"});
  implement<&falseForFakesKernel>(library, {"cudnn_is_acceptable", "_nested_tensor_from_mask_left_aligned"});
  implement<&meshgridKernel>(library, {"meshgrid", "meshgrid.indexing"});
  registerWhere<&allocatingKernel>(library, &mayAllocate);  // last: for all that have no other kernel
}

}  // namespace

void registerComposites() {
  hooks().on_composites_key.add(&registerKernels);
  hooks().on_lazy_bits = &prepareForBits;
  hooks().on_fake_key.add([] { makeGradientsFake(true); });
  hooks().followers.add(&followUncountedVersions);
}

bool isUndeferredFake(const Tensor& tensor) {
  return isFake(tensor) && !tensor.key_set().has(DispatchKey::DeferredInit);
}

void replaceArguments(const OperatorHandle& op, Stack& stack, IValue result) {
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.push_back(std::move(result));
}

void callWithFactoriesOfCall(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const FactoriesOfCall guard{argumentsOf(op, *stack)};
  callWithResizableOutputs(op, keys, stack);
}

void allocatingKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Stack arguments = argumentsOf(op, *stack).vec();
  const std::size_t bottom = stack->size() - arguments.size();
  try {
    callWithFactoriesOfCall(op, keys, stack);
    return;
  } catch (const c10::Error& error) {
    if (!isNoDataError(error)) {
      throw;
    }
  }
  stack->resize(bottom);  // discards partial results of the call
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  const RealFactoriesGuard guard;
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

}  // namespace torchext
