#include "composites.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/resize_ops.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/resizable_outputs.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/autograd.h"
#include "../trials/refusals.h"
#include "../values/assumed_reads.h"
#include "../values/assumptions.h"
#include "../values/known_values.h"
#include "../values/value_shortcuts.h"
#include "gradient_factories.h"

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
  const Tensor& self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  const bool is_pinned = isFake(self) && self.has_storage() && isPinnedStorage(self.storage());
  op.redispatchBoxed(keys & kBelowComposites, stack);
  stack->back() = is_pinned || stack->back().toBool();
}

// Replaces the argument called `name`, whose memory the operator reads, by its values if it is a fake with dimensions.
// Raises an error if these are unknown. An argument without dimensions is read through an operator.
c10::IValue& readValues(const OperatorHandle& op, Stack& stack, const char* name) {
  const auto position = toSize(findArgument(op.schema(), name));
  c10::IValue& argument = torch::jit::peek(stack, position, op.schema().arguments().size());
  const Tensor tensor = argument.toTensor();
  const auto accepted = assumesValues() ? ValueKind::kAssumed : ValueKind::kKnown;
  const Tensor value = isFake(tensor) ? valueOf(tensor, accepted) : Tensor{};
  if (value.defined()) {
    argument = value;
  } else if (isFake(tensor) && tensor.dim() > 0 && !tensor.key_set().has(DispatchKey::DeferredInit)) {
    TORCHEXT_THROW(DataDependentError,
                   c10::str("`", op.operator_name(), "` needs the values of its argument `", name,
                            "`, but it is a fake tensor without values. Pass a real tensor or numbers instead."));
  }
  return argument;
}

bool isUndeferredFake(const Tensor& tensor) {
  return isFake(tensor) && !tensor.key_set().has(DispatchKey::DeferredInit);
}

// Replaces the fake `lengths` of a call by assumed lengths if they have no values. The sequences are in dimension `dim`
// of `sequences`: padded, or concatenated if `sequences` has no other dimension.
void assumeLengths(const OperatorHandle& op, c10::IValue& lengths, const Tensor& sequences, int64_t dim) {
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
    c10::IValue& lengths = torch::jit::peek(*stack, position, count);
    const Tensor value = lengths.toTensor().to(c10::kLong).contiguous();
    lengths = std::vector<int64_t>(value.data_ptr<int64_t>(), value.data_ptr<int64_t>() + value.numel());
  }
  of_numbers.callBoxed(stack);
}

void tensorSplitKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  readValues(op, *stack, "tensor_indices_or_sections");
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

void callWithFactoriesOfCall(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const FactoriesOfCall guard{topOf(*stack, op.schema().arguments().size())};
  callWithResizableOutputs(op, keys, stack);
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
  torch::jit::drop(*stack, 2);
  const FakeFactoriesGuard guard;
  torch::jit::push(*stack, at::zeros(sizes, self.options()).scatter_(-1, self.unsqueeze(-1), 1));
}

// The formula for tangents of `prod` (forward mode) calls `prod_backward()`.
void prodKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor& self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  const TangentFormula formula{self._fw_grad(/*level=*/0).defined()};
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// Whether a formula reads `self`, which has no values, only to find zeros or NaNs: NOTE [Shortcuts that read values].
// Formulas compare before they read, so they read truth values, or a number of elements.
bool isCheckedForSpecialValues(const Tensor& self) {
  const bool may_be_check = self.scalar_type() == c10::kBool || self.scalar_type() == c10::kLong;
  return may_be_check && isUndeferredFake(self) && !hasValue(self) &&
         (isInTangentFormula() || (isInGradientFormula() && runsNodeForSpecialValues()));
}

// `torch.tensor([x, y])` reads its elements with our keys excluded (`internal_new_from_data()`, tensor_new.cpp).
void localScalarKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  if (isCheckedForSpecialValues(self)) {
    torch::jit::drop(*stack, 1);
    torch::jit::push(*stack, c10::Scalar{false});
    return;
  }
  const bool calls_fake_directly = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Fake) && isFake(self) &&
                                   !self.key_set().has(DispatchKey::DeferredInit) && isSmall(self);
  op.redispatchBoxed(calls_fake_directly ? DispatchKeySet{DispatchKey::Fake} : keys & kBelowComposites, stack);
}

// `prod_backward()` reads the positions of zeros.
void nonzeroKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  if (isCheckedForSpecialValues(self)) {
    torch::jit::drop(*stack, 1);
    torch::jit::push(*stack, self.new_empty({0, self.dim()}, c10::kLong));
    return;
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
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
  const Tensor& query = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  op.redispatchBoxed(DispatchKeySet{query.is_cpu() ? DispatchKey::CPU : DispatchKey::Meta}, stack);
}

void replaceArguments(const OperatorHandle& op, Stack& stack, bool answer) {
  torch::jit::drop(stack, op.schema().arguments().size());
  torch::jit::push(stack, answer);
}

// Gradient formulas check whether the loss depends on the phase of eigenvectors (`linalg_eig_backward()`,
// `svd_backward()`). For fakes it is assumed not to.
void allcloseKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto arguments = topOf(*stack, op.schema().arguments().size());
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

// `torch.nn.TransformerEncoder` calls one to decide whether to drop masked elements with a nested tensor, which
// has no fakes; otherwise it computes results of the same shape with the mask. Recurrent networks ask whether cuDNN is
// acceptable before they compare addresses of weights with those of its buffer (ATen's `try_get_weight_buf()`);
// PyTorch's own kernels are used instead, as on fake devices.
void falseForFakesKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (hasTensor(topOf(*stack, op.schema().arguments().size()), isUndeferredFake)) {
    replaceArguments(op, *stack, false);
    return;
  }
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

// Makes the allocations of a composite operator fake, even outside of fake_mode(), or deferred. If the kernel accesses
// memory, they are real: `at::tensor()` writes numbers into the result of a factory (`tensor_cpu()`, Utils.cpp), and
// `ctc_loss` divides by such a tensor of target lengths.
void allocatingKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Stack arguments = topOf(*stack, op.schema().arguments().size()).vec();
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

// The composite kernel prints the values of a tensor that it refuses.
void meshgridKernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  forEachTensor(topOf(*stack, op.schema().arguments().size()), [](const Tensor& tensor) {
    TORCH_CHECK(!isUndeferredFake(tensor) || tensor.dim() <= 1,
                "torch.meshgrid: Expected 0D or 1D tensor in the tensor list but got: [ ", tensor.toString(), "{",
                c10::Join(",", tensor.sizes()), "} ]");
  });
  allocatingKernel(op, keys, stack);
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

// Returns true for composite operators that may allocate a tensor and write to it, as opposed to making views.
bool mayAllocate(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_tensor = [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  return compositeKernelOf(op) && !onlyMakesViews(op) &&
         std::any_of(schema.returns().begin(), schema.returns().end(), is_tensor);
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
  torch::jit::drop(*stack, count);
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
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

// Runs `kKernel` and translates its C++ errors into Python errors.
template <void (*kKernel)(const OperatorHandle&, DispatchKeySet, Stack*)>
void translated(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  try {
    kKernel(op, keys, stack);
  } catch (const DataDependentError& error) {
    translateError(ErrorKind::kDataDependent, error);
    throw;
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
  const bool is_fake = isFake(torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor());
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
    for (const char* name : {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "linalg_cross"}) {
      added->impl(name, torch::CppFunction::makeFromBoxedFunction<&allocatingKernel>());
    }
    return added;
  }();
}

}  // namespace

void prepareOperatorsForLazyBits(DispatchKeySet bits) {
  if (bits.has_any(DispatchKeySet{DispatchKey::Conjugate} | DispatchKeySet{DispatchKey::Negative})) {
    makeOutputsWithMathBitsResizable();
  }
  if (bits.has(DispatchKey::ZeroTensor)) {
    makeResultsOfZerosFake();
  }
}

void registerComposites(torch::Library& library) {
  library.impl("max_pool1d", &maxPool1d);
  library.impl("_local_scalar_dense", torch::CppFunction::makeFromBoxedFunction<&localScalarKernel>());
  library.impl("nonzero", torch::CppFunction::makeFromBoxedFunction<&nonzeroKernel>());
  library.impl("record_stream", &recordStream);
  library.impl("is_pinned", torch::CppFunction::makeFromBoxedFunction<&isPinnedKernel>());
  library.impl("_fused_sdp_choice", torch::CppFunction::makeFromBoxedFunction<&sdpChoiceKernel>());
  library.impl("ctc_loss.Tensor", torch::CppFunction::makeFromBoxedFunction<&translated<&ctcLossKernel>>());
  library.impl("tensor_split.tensor_indices_or_sections",
               torch::CppFunction::makeFromBoxedFunction<&translated<&tensorSplitKernel>>());
  library.impl("cudnn_is_acceptable", torch::CppFunction::makeFromBoxedFunction<&falseForFakesKernel>());
  library.impl("_pad_packed_sequence", torch::CppFunction::makeFromBoxedFunction<&translated<&padPackedKernel>>());
  for (const char* name :
       {"lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_pack_padded_sequence_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&translated<&recurrentKernel>>());
  }
  library.impl("resize_", &resizeOutput);
  library.impl("sparse_coo_tensor.indices",
               torch::CppFunction::makeFromBoxedFunction<&translated<&sizeOfIndicesKernel>>());
  library.impl("sparse_coo_tensor.indices_size", torch::CppFunction::makeFromBoxedFunction<&constructKernel>());
  library.impl("_validate_sparse_coo_tensor_args", torch::CppFunction::makeFromBoxedFunction<&validateIndicesKernel>());
  library.impl("one_hot", torch::CppFunction::makeFromBoxedFunction<&oneHotKernel>());
  library.impl("allclose", torch::CppFunction::makeFromBoxedFunction<&allcloseKernel>());
  library.impl("prod", torch::CppFunction::makeFromBoxedFunction<&prodKernel>());
  library.impl("prod.dim_int", torch::CppFunction::makeFromBoxedFunction<&prodKernel>());
  library.impl("_nested_tensor_from_mask_left_aligned",
               torch::CppFunction::makeFromBoxedFunction<&falseForFakesKernel>());
  for (const char* name : {"meshgrid", "meshgrid.indexing"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&meshgridKernel>());
  }
  registerWhere<&allocatingKernel>(library, &mayAllocate);
}

}  // namespace torchext
