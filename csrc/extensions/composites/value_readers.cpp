#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../values/assumed_values.h"
#include "../values/follow_values.h"
#include "../values/known_values.h"
#include "composites.h"
#include "gradient_formulas.h"

namespace torchext {

using c10::DispatchKeySet;

namespace {

// Runs `kKernel` and translates its C++ errors into Python errors.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kKernel>
void translated(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  try {
    kKernel(op, keys, stack);
  } catch (const DataDependentError& error) {
    translateError(ErrorKind::kDataDependent, error);
    throw;
  }
}

// Replaces the argument called `name`, whose memory the operator reads, by its values if it is a fake with dimensions.
// Raises an error if these are unknown. An argument without dimensions is read through an operator. Returns the
// argument on the stack.
IValue& readValues(const OperatorHandle& op, Stack& stack, const char* name) {
  const auto position = toSize(findArgument(op.schema(), name));
  IValue& argument = torch::jit::peek(stack, position, op.schema().arguments().size());
  const Tensor tensor = argument.toTensor();
  const auto accepted = assumesValues() ? ValueKind::kAssumed : ValueKind::kKnown;
  const Tensor value = isFake(tensor) ? valueOf(tensor, accepted) : Tensor{};
  if (value.defined()) {
    argument = value;
  } else if (isUndeferredFake(tensor) && tensor.dim() > 0) {
    TORCHEXT_THROW(DataDependentError,
                   c10::str("`", op.operator_name(), "` needs the values of its argument `", name,
                            "`, but it is a fake tensor without values. Pass a real tensor or numbers instead."));
  }
  return argument;
}

// Replaces the fake `lengths` of a call by assumed lengths if they have no values. The sequences are in dimension `dim`
// of `sequences`: padded, or concatenated if `sequences` has no other dimension.
void assumeLengths(const OperatorHandle& op, IValue& lengths, const Tensor& sequences, int64_t dim) {
  const Tensor fake = lengths.toTensor();
  if (!isUndeferredFake(fake) || fake.dim() == 0 || sequences.dim() == 0 || !assumesValues()) {
    return;
  }
  const int64_t size = sequences.size(dim);
  lengths = sequences.dim() == 1 ? assumedShares(op, fake, size) : assumedLengths(op, fake, size);
}

// The kernel converts lengths to int64, and divides by a tensor of them (`ctc_loss_impl()`). In fake_mode() these would
// be fakes. The overload for numbers calls operators.
void ctcLossKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const auto of_numbers = c10::Dispatcher::singleton().findSchemaOrThrow("aten::ctc_loss", "IntList");
  const std::size_t count = op.schema().arguments().size();
  const Tensor probabilities = torch::jit::peek(*stack, 0, count).toTensor();
  const Tensor targets = torch::jit::peek(*stack, 1, count).toTensor();
  assumeLengths(op, torch::jit::peek(*stack, 2, count), probabilities, 0);
  assumeLengths(op, torch::jit::peek(*stack, 3, count), targets, -1);
  bool are_numbers = isFake(probabilities);
  for (const char* name : {"input_lengths", "target_lengths"}) {
    const Tensor value = readValues(op, *stack, name).toTensor();
    are_numbers = are_numbers && !isFake(value) && value.is_cpu() && value.dim() == 1 &&
                  c10::isIntegralType(value.scalar_type(), /*includeBool=*/false);
  }
  if (!are_numbers) {
    op.redispatchBoxed(keys & kBelowComposites, stack);
    return;
  }
  for (const std::size_t position : {std::size_t{2}, std::size_t{3}}) {
    const HiddenCalls guard;
    IValue& lengths = torch::jit::peek(*stack, position, count);
    const Tensor value = lengths.toTensor().to(c10::kLong).contiguous();
    lengths = std::vector<int64_t>(value.data_ptr<int64_t>(), value.data_ptr<int64_t>() + value.numel());
  }
  of_numbers.callBoxed(stack);
}

void tensorSplitKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  readValues(op, *stack, "tensor_indices_or_sections");
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// On the CPU, `one_hot()` reads values to compare them with the number of classes. Otherwise this does the same as it.
void oneHotKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, 2).toTensor();
  const int64_t classes = torch::jit::peek(*stack, 1, 2).toInt();
  const bool is_known = isFake(self) && hasValue(self) && kindOf(self) == ValueKind::kKnown;
  const bool reads = isUndeferredFake(self) && self.is_cpu() && !is_known && classes != -1;
  if (!reads || self.numel() == 0 || self.scalar_type() != c10::kLong) {
    callWithFactoriesOfCall(op, keys, stack);
    return;
  }
  TORCH_CHECK(classes > 0, "Class values must be smaller than num_classes.");
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes.push_back(classes);
  const FakeFactoriesGuard guard;
  replaceArguments(op, *stack, at::zeros(sizes, self.options()).scatter_(-1, self.unsqueeze(-1), 1));
}

// Gradient formulas check whether the loss depends on the phase of eigenvectors (`linalg_eig_backward()`,
// `svd_backward()`). For fakes it is assumed not to.
void allcloseKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto arguments = argumentsOf(op, *stack);
  if (hasTensor(arguments, isUndeferredFake)) {
    const auto answer =
        isInGradientFormula() ? std::optional{true} : assumeEqual(op, arguments[0].toTensor(), arguments[1].toTensor());
    if (answer) {
      replaceArguments(op, *stack, *answer);
      return;
    }
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// Recurrent networks read the number of sequences in each step of a packed sequence.
void recurrentKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  readValues(op, *stack, "batch_sizes");
  allocatingKernel(op, keys, stack);
}

// Replaces the kernel of `_pad_packed_sequence()`, which writes the lengths into memory. The kind is that of the values
// in `steps`.
Stack padSequences(const Tensor& data,
                   const Tensor& steps,
                   bool batch_first,
                   const c10::Scalar& padding,
                   int64_t total,
                   ValueKind kind) {
  const c10::ArrayRef<int64_t> batch_sizes{steps.data_ptr<int64_t>(), toSize(steps.numel())};
  const auto count = toSigned(batch_sizes.size());
  TORCH_CHECK(total <= 0 || total >= count,
              "Expected total_length to be at least the length of the longest sequence in input, but got total_length=",
              total, " and max sequence length being ", count);
  const auto sizes_of = [&data](int64_t num_steps, int64_t batch) {
    std::vector<int64_t> sizes = data.sizes().vec();
    sizes.front() = batch;
    sizes.insert(sizes.begin(), num_steps);
    return sizes;
  };
  const FakeFactoriesGuard guard;
  const Tensor output = at::full(sizes_of(std::max(total, count), batch_sizes.front()), padding, data.options());
  std::vector<int64_t> lengths;
  int64_t first = 0;
  int64_t offset = 0;
  for (const auto end : c10::irange(int64_t{1}, count + 1)) {
    const int64_t batch = batch_sizes[toSize(first)];
    const int64_t next = end < count ? batch_sizes[toSize(end)] : 0;
    if (next != batch) {
      const int64_t rows = (end - first) * batch;
      const Tensor part = data.narrow(0, offset, rows).view(sizes_of(end - first, batch));
      output.narrow(0, first, end - first).narrow(1, 0, batch).copy_(part);
      lengths.insert(lengths.begin(), toSize(batch - next), end);
      offset += rows;
      first = end;
    }
  }
  const auto num_lengths = toSigned(lengths.size());
  const Tensor made = at::empty({num_lengths}, at::TensorOptions(c10::kLong).device(c10::kCPU));
  {
    const HiddenCalls hidden;
    setValue(made, at::from_blob(lengths.data(), {num_lengths}, at::TensorOptions(c10::kLong)), kind);
  }
  return {batch_first ? output.transpose(0, 1) : output, made};
}

void padPackedKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  const Tensor data = torch::jit::peek(*stack, 0, count).toTensor();
  const Tensor fake_steps = torch::jit::peek(*stack, 1, count).toTensor();
  const Tensor steps = readValues(op, *stack, "batch_sizes").toTensor();
  if (!isUndeferredFake(data) || isFake(steps) || !steps.is_contiguous()) {
    allocatingKernel(op, keys, stack);
    return;
  }
  Stack results = padSequences(data, steps, torch::jit::peek(*stack, 2, count).toBool(),
                               torch::jit::peek(*stack, 3, count).toScalar(),
                               torch::jit::peek(*stack, 4, count).toInt(), kindOf(fake_steps));
  replaceTop(*stack, count, std::move(results));
}

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
  Stack arguments = topOf(*stack, count).vec();
  if (!isUndeferredFake(arguments[0].toTensor())) {
    allocatingKernel(op, keys, stack);
    return;
  }
  Stack small{readValues(op, *stack, "indices"), arguments[1], {}, {}, {}, {}, {}};
  replaceByZeros(small[1]);
  {
    const HiddenCalls hidden;
    op.callBoxed(small);
    arguments.insert(arguments.begin() + 2, small.front().toTensor().sizes());
  }
  replaceTop(*stack, count, std::move(arguments));
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
  replaceArguments(
      op, *stack,
      at::_sparse_coo_tensor_with_dims_and_tensors(indices.size(0), values.dim() - 1, size, indices, values,
                                                   values.options().layout(at::kSparse), is_coalesced));
}

}  // namespace

void registerValueReaders(torch::Library& library) {
  implement<&translated<&ctcLossKernel>>(library, {"ctc_loss.Tensor"});
  implement<&translated<&tensorSplitKernel>>(library, {"tensor_split.tensor_indices_or_sections"});
  implement<&translated<&padPackedKernel>>(library, {"_pad_packed_sequence"});
  implement<&translated<&recurrentKernel>>(
      library, {"lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_pack_padded_sequence_backward"});
  implement<&oneHotKernel>(library, {"one_hot"});
  implement<&allcloseKernel>(library, {"allclose"});
  implement<&translated<&sizeOfIndicesKernel>>(library, {"sparse_coo_tensor.indices"});
  implement<&constructKernel>(library, {"sparse_coo_tensor.indices_size"});
  implement<&validateIndicesKernel>(library, {"_validate_sparse_coo_tensor_args"});
}

}  // namespace torchext
