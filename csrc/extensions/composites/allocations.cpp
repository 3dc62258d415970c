#include "composites.h"

#include <algorithm>
#include <optional>

#include <ATen/ops/resize_ops.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/resizable_outputs.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../support/autograd.h"
#include "../values/factories_of_call.h"
#include "composite_kernels.h"
#include "gradient_factories.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

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

void makeOutputsWithMathBitsResizable() {
  [[maybe_unused]] static const auto* library = [] {
    auto* added = new torch::Library(torch::Library::IMPL, "aten", kCompositesKey, __FILE__, __LINE__);
    registerWhere<&callWithResizableOutputs>(*added, &ResizableOutputs::existFor);
    return added;
  }();
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

void makeResultsOfZerosFake() {
  [[maybe_unused]] static const auto* library = [] {
    auto* added = new torch::Library(torch::Library::IMPL, "aten", kCompositesKey, __FILE__, __LINE__);
    registerWhere<&viewZerosKernel>(*added, &viewsZeros);
    implement<&allocatingKernel>(*added, {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "linalg_cross"});
    return added;
  }();
}

}  // namespace

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

void prepareOperatorsForLazyBits(DispatchKeySet bits) {
  if (bits.has_any(DispatchKeySet{DispatchKey::Conjugate} | DispatchKeySet{DispatchKey::Negative})) {
    makeOutputsWithMathBitsResizable();
  }
  if (bits.has(DispatchKey::ZeroTensor)) {
    makeResultsOfZerosFake();
  }
}

void registerAllocations(torch::Library& library) {
  library.impl("resize_", &resizeOutput);
  implement<&meshgridKernel>(library, {"meshgrid", "meshgrid.indexing"});
  registerWhere<&allocatingKernel>(library, &mayAllocate);
}

}  // namespace torchext
