#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/zeros.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../values/known_values.h"
#include "composite_kernels.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// Replaces an argument by real zeros of its shape, which need no memory.
void replaceByZeros(IValue& argument) {
  const Tensor tensor = argument.toTensor();
  const HiddenCalls hidden;
  argument = at::zeros({}, at::TensorOptions(tensor.scalar_type())).expand(tensor.sizes());
}

// (indices, values, ...) The kernel reads the largest indices from memory, unlike that of the overload with a size.
void sizeOfIndicesKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const auto with_size =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::sparse_coo_tensor", "indices_size");
  const std::size_t count = op.schema().arguments().size();
  const Stack arguments = topOf(*stack, count).vec();
  if (!isUndeferredFake(arguments[0].toTensor())) {
    allocatingKernel(op, keys, stack);
    return;
  }
  Stack small{readValues(op, *stack, "indices"), arguments[1], {}, {}, {}, {}, {}};
  replaceByZeros(small[1]);
  std::vector<int64_t> sizes;
  {
    const HiddenCalls hidden;
    op.callBoxed(small);
    sizes = small.front().toTensor().sizes().vec();
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), arguments.begin(), arguments.begin() + 2);
  torch::jit::push(*stack, sizes);
  stack->insert(stack->end(), arguments.begin() + 2, arguments.end());
  with_size.callBoxed(stack);
}

// (indices, values, size, is_coalesced) The kernel reads the smallest and the largest indices from memory. Unknown
// indices are assumed to be valid.
void validateIndicesKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  IValue& indices = torch::jit::peek(*stack, 0, count);
  IValue& values = torch::jit::peek(*stack, 1, count);
  std::optional<HiddenCalls> hidden;
  if (isUndeferredFake(indices.toTensor())) {
    const Tensor known = valueOf(indices.toTensor());
    replaceByZeros(values);
    if (known.defined()) {
      indices = known;
      hidden.emplace();  // the tensors that the kernel makes have memory
    } else {
      replaceByZeros(indices);
      torch::jit::peek(*stack, 3, count) = IValue{};
    }
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// (indices, values, size, dtype, layout, device, pin_memory, is_coalesced) The kernel checks invariants without the
// dispatcher.
void constructKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  const Tensor indices = torch::jit::peek(*stack, 0, count).toTensor();
  Tensor values = torch::jit::peek(*stack, 1, count).toTensor();
  const bool is_checked = at::globalContext().checkSparseTensorInvariants() == true;  // optional since 2.13
  if (!is_checked || !isUndeferredFake(indices)) {
    allocatingKernel(op, keys, stack);
    return;
  }
  const auto size = torch::jit::peek(*stack, 2, count).toIntVector();
  const auto is_coalesced = torch::jit::peek(*stack, 7, count).toOptional<bool>();
  at::_validate_sparse_coo_tensor_args(indices, values, size, is_coalesced);
  values = values.dim() == 0 ? values.expand({1}) : values;
  torch::jit::drop(*stack, count);
  torch::jit::push(
      *stack, at::_sparse_coo_tensor_with_dims_and_tensors(indices.size(0), values.dim() - 1, size, indices, values,
                                                           values.options().layout(at::kSparse), is_coalesced));
}

}  // namespace

void registerSparseConstructors(torch::Library& library) {
  implement<&translated<&sizeOfIndicesKernel>>(library, {"sparse_coo_tensor.indices"});
  implement<&constructKernel>(library, {"sparse_coo_tensor.indices_size"});
  implement<&validateIndicesKernel>(library, {"_validate_sparse_coo_tensor_args"});
}

}  // namespace torchext
