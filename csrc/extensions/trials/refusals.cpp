// NOTE [Errors of real tensors]
//
// A Meta kernel checks less than the real kernel, and its messages differ. Real kernels check before they compute, so
// they are the best source of errors for real tensors. A call that has not been made before is therefore tried out on
// stand-ins: small real tensors of the same shapes, strides and dtypes (stand_ins.h). If the kernel raises an error,
// the fake call raises it.
//
//   * Values do not exist, so an error counts only if it does not depend on them: it is the same for all fills, or
//     concerns dtypes.
//   * A call that is too large is tried out with smaller sizes: NOTE [Smaller calls]. An error counts if the same call
//     passes with common dtypes: then it concerns dtypes, regardless of sizes. Otherwise the call is tried out at its
//     own sizes if its arguments are affordable, up to the point where its kernel allocates a large result.
//   * If the Meta kernel has raised an error, the call is most likely wrong. It may then be larger, because its kernel
//     will not compute.
//   * Only PyTorch's own CPU kernels are run, and none that would draw from a user's generator or that trusts an
//     argument: NOTE [Preconditions of kernels].
//
// Calls that have passed or were refused are remembered, and not tried out again.

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include "../../core/fake/cache/call_key.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/torch_internals/dispatcher_internals.h"
#include "../../core/torch_internals/error_texts.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../kernels/device_kernels.h"
#include "../support/allocation_limit.h"
#include "../support/registrations.h"
#include "stand_ins.h"
#include "trials.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// ---- Writes into overlapping memory ----

// In-place operators that write to one element several times without an error, because they write the same value each
// time (`set_check_mem_overlap(false)`) or do not check.
const OperatorSet writesRepeatedly{
    "may write to one element several times: always the same value, or unchecked",
    {"aten::addmv_", "aten::baddbmm_", "aten::conj_physical_", "aten::fill_", "aten::index_fill_", "aten::index_put_",
     "aten::masked_fill_", "aten::nan_to_num_", "aten::threshold_", "aten::tril_", "aten::triu_", "aten::zero_"}};

bool isElementwise(const OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) || op.schema().name() == "aten::copy_";
}

// Returns true for a PyTorch operator that refuses to write to one element several times.
bool refusesRepeatedWrites(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (namespaceOf(op.operator_name()) != "aten" || op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  return isElementwise(op) || (name.back() == '_' && name.rfind("aten::_", 0) != 0);
}

// Decides as `at::get_overlap_status()` does: it ignores tensors with gaps, and full overlap is harmless if the strides
// are equal.
bool overlapsPartially(const Tensor& a, const Tensor& b) {
  if (a.is_same(b) || !a.has_storage() || !b.has_storage() || !isSameStorage(a.storage(), b.storage()) ||
      a.numel() == 0 || b.numel() == 0 || !a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) {
    return false;
  }
  const std::size_t begin_a = toSize(a.storage_offset()) * a.itemsize();
  const std::size_t begin_b = toSize(b.storage_offset()) * b.itemsize();
  if (begin_a == begin_b && a.nbytes() == b.nbytes()) {
    return a.strides() != b.strides();
  }
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

// Returns true for a `copy_` that does nothing (`copy_impl()`, Copy.cpp).
bool copiesOntoItself(const OperatorHandle& op, const Stack& stack) {
  if (op.schema().name() != "aten::copy_") {
    return false;
  }
  const auto arguments = argumentsOf(op, stack);
  const Tensor& self = arguments[0].toTensor();
  const Tensor& source = arguments[1].toTensor();
  return self.has_storage() && source.has_storage() && isSameStorage(self.storage(), source.storage()) &&
         self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
         self.strides() == source.strides() && self.scalar_type() == source.scalar_type() &&
         self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
}

// Returns true for a call that computes into a temporary tensor (ATen's `unary_op_impl_with_complex_to_float_out()`).
bool makesFloatsOfComplex(const OperatorHandle& op, const Tensor& written, const Tensor& other) {
  const std::string& name = op.schema().name();
  return other.is_complex() && !written.is_complex() && (name == "aten::abs" || name == "aten::angle");
}

void checkInputs(const OperatorHandle& op, const Tensor& written, const Stack& stack) {
  forEachTensor(argumentsOf(op, stack), [&](const Tensor& other) {
    TORCH_CHECK(makesFloatsOfComplex(op, written, other) || !overlapsPartially(written, other),
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation.");
  });
}

// Raises the kernels' error if the call would write to one element several times, or, elementwise, to memory that it
// also reads as another element (`TensorIteratorBase::compute_mem_overlaps()`). Most Meta kernels do not check, and
// PyTorch's own functions for it compare data pointers.
void refuseOverlap(const OperatorHandle& op, const Stack& stack) {
  if (writesRepeatedly(op)) {
    return;
  }
  const bool refuses_repeated = refusesRepeatedWrites(op);
  const bool is_elementwise = isElementwise(op);
  if ((!refuses_repeated && !is_elementwise) || copiesOntoItself(op, stack)) {
    return;
  }
  forEachWritten(op.schema(), argumentsOf(op, stack), [&](const Tensor& written, std::size_t /*position*/) {
    if (refuses_repeated) {
      at::assert_no_internal_overlap(written);
    }
    if (is_elementwise) {
      checkInputs(op, written, stack);
    }
  });
}

// ---- Trials ----

// How a call is tried out, by its TrialReason and its kind. Each function raises the refusal of its trial. The
// functions whose names begin with `tryOut` return the results of the trial, if any. Views are not tried out, nor are
// operators that check alignment at a smaller size.
//
//   kMetaKernelAccepts                        tryOutAfterMeta
//     an ATen operator without a CPU kernel     refuseWithoutCpuKernel
//     a cheap call                              tryOutAtOwnSize
//     a factory                                 with small requested sizes
//     a recurrent layer of oneDNN               with small sizes
//     all others                                tryOutScaled
//       a convolution                             tryOutSmallConvolution
//       an operator that trusts its sizes         tryOutAtOwnSize, or tryOutOneGroup
//       all others                                with scaled sizes; if refused, other dtypes, or its own size
//   kMetaKernelRefuses, kInsteadOfPython      resultsOfReal: at its own size
//   kNeedsValues                              tryOutWithoutValues: resultsOfReal, or tryOutScaled if not cheap

// The maximum number of elements that arguments and results together may have in a trial:
constexpr double kModest = 4194304;       // for a call that has no smaller version
constexpr double kAffordable = 33554432;  // for a call that will most likely be refused

// The largest result that a trial of a probably refused call allocates. If the kernel gets there, it has accepted the
// call.
constexpr std::size_t kMostBytes = std::size_t{1} << 28U;

// The same for a trial of a call whose results are unknown.
constexpr std::size_t kSmallBytes = std::size_t{1} << 19U;

const OperatorSet checksAlignment{
    "require strides that are a multiple of some number of bytes, unlike divided sizes",
    {"aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2"}};

// Returns true for operators that make tensors without tensor arguments. The requested size may exceed memory.
bool makesTensorsWithoutTensors(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return takesTensorOptions(op.schema()) || op.hasKernelForDispatchKey(DispatchKey::BackendSelect) ||
         std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
           return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                  argument.type()->isSubtypeOf(*c10::ListType::ofTensors()) ||
                  argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors());
         });
}

// The locations of checks that CPU and CUDA kernels share: those of structured kernels and their outputs, of
// elementwise kernels, of typed access to data, of indices, of random fills, and of `dot`. An error's text contains the
// location.
constexpr std::array<std::string_view, 10> kSharedChecks{"raised from meta at",
                                                         "raised from resize_out at",
                                                         "raised from dot_check at",
                                                         "/ATen/ExpandUtils.",
                                                         "/TensorIterator.cpp",
                                                         "/TensorMethods.cpp",
                                                         "/WrapDim",
                                                         "/ReduceAllOps.cpp",
                                                         "/IndexingUtils.h",
                                                         "/native/DistributionTemplates.h"};

// Returns the message with the backtrace. Looking up function names for it takes milliseconds.
std::string messageAndOriginOf(const Refusal& refusal) {
  try {
    std::rethrow_exception(refusal.error);
  } catch (const std::exception& raised) {
    return raised.what();
  }
}

bool isShared(const OperatorHandle& op, const Refusal& refusal) {
  // A shared function may refuse an option of one device, and calls a loop that only the CPU has.
  constexpr std::array<std::string_view, 5> kOfOneDevice{"cpu", "CPU", "cuda", "CUDA", "/native/cpu/"};
  const std::string text = messageAndOriginOf(refusal);
  const auto concerns_one = [&](std::string_view part) {
    return (part.front() == '/' ? text : refusal.message).find(part) != std::string::npos;
  };
  if (sharesKernels(op) && std::none_of(kOfOneDevice.begin(), kOfOneDevice.end(), concerns_one)) {
    return true;
  }
  return std::any_of(kSharedChecks.begin(), kSharedChecks.end(),
                     [&text](std::string_view origin) { return text.find(origin) != std::string::npos; });
}

// Separate checks of CUDA kernels, possibly with a different message.
struct OwnCheck {
  std::string_view name;  // of the operator, or empty for all operators
  std::string_view begin_on_cpu;
  std::string_view begin_on_cuda;
};

constexpr std::string_view kOverlaps = "unsupported operation: some elements of the input tensor and the written-to";
constexpr std::string_view kOtherShape = "source tensor shape must match self tensor shape";
constexpr std::string_view kRepeats = "unsupported operation: more than one element of the written-to tensor refers to";
constexpr std::array<OwnCheck, 6> kOwnChecks{{
    // `addmm_impl_cpu_()` (LinearAlgebra.cpp) and `addmm_out_cuda_impl()` (cuda/Blas.cpp)
    {"", "expected m1 and m2 to have the same dtype", "expected mat1 and mat2 to have the same dtype"},
    {"aten::masked_scatter_", "masked_scatter_ only supports boolean masks, but got mask with dtype Byte",
     "masked_scatter_ only supports boolean masks, but got mask with dtype unsigned char"},
    {"aten::index_add", kOtherShape, kOtherShape},
    {"aten::cat", kOverlaps, kOverlaps},
    {"aten::cat", kRepeats, kRepeats},
    // `data_ptr<int64_t>()` (NLLLoss2d.cu)
    {"aten::nll_loss2d_forward", "expected target dtype to be Long or Byte, but got",
     "expected scalar type Long but found"},
}};

// Raises CUDA's error for a call that the CPU refuses. Returns if CUDA does not share the check: the CUDA kernel may
// accept the call, for example because of its dtype.
void raiseForCuda(const OperatorHandle& op, ArrayRef<IValue> arguments, const Refusal& refusal) {
  if (isConvolution(op)) {
    // `check_input_same_type_as_parameters()` (Convolution.cpp)
    const Tensor& input = arguments[0].toTensor();
    const Tensor& weight = arguments[1].toTensor();
    TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "Input type (torch.cuda.", input.scalar_type(),
                "Tensor) and weight type (torch.cuda.", weight.scalar_type(), "Tensor) should be the same");
  }
  const auto begins_with = [&refusal](const char* begin) { return refusal.message.rfind(begin, 0) == 0; };
  // CUDA kernels of normalizations read their parameters in the dtype of the input (layer_norm_kernel.cu), and those of
  // bags read the weights of samples in that of the embedding (EmbeddingBag.cu).
  const bool has_weights = begins_with(
      "Expected tensor for argument #1 'weight' to have the same type as tensor for "
      "argument #1 'per_sample_weights'");
  if (has_weights || begins_with("mixed dtype (CPU)")) {
    const auto weights = ArrayRef<IValue>(argumentNamed(op, arguments, "per_sample_weights"));
    forEachTensor(has_weights ? weights : arguments, [&arguments](const Tensor& parameter) {
      const auto expected = arguments[0].toTensor().scalar_type();
      TORCH_CHECK(parameter.scalar_type() == expected, "expected scalar type ", expected, " but found ",
                  parameter.scalar_type());
    });
  }
  // The dtypes of CUDA kernels are checked separately: NOTE [Dtypes that CUDA kernels refuse].
  const bool lacks_code = refusal.message.find("\" not implemented for '") != std::string::npos;
  if (!lacks_code && isShared(op, refusal)) {
    std::rethrow_exception(refusal.error);
  }
  for (const OwnCheck& check : kOwnChecks) {
    const std::size_t length = check.begin_on_cpu.size();
    const bool is_of_operator = check.name.empty() || op.schema().name() == check.name;
    TORCH_CHECK(!is_of_operator || refusal.message.compare(0, length, check.begin_on_cpu) != 0, check.begin_on_cuda,
                refusal.message.substr(std::min(length, refusal.message.size())));
  }
}

// Raises the refusal, if any. Otherwise returns the results, if any.
Stack raiseOrReturn(const OperatorHandle& op, ArrayRef<IValue> arguments, Outcome outcome) {
  if (outcome.refusal && isOnCuda(arguments)) {
    raiseForCuda(op, arguments, *outcome.refusal);
  } else if (outcome.refusal) {
    std::rethrow_exception(outcome.refusal->error);
  }
  return std::move(outcome.results);
}

RealResults tryOutAtOwnSize(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  return {raiseOrReturn(op, arguments, outcomeOf(op, arguments, {})), /*has_sizes=*/true};
}

// Returns the arguments with all sizes and numbers set to 1.
Stack withOnes(ArrayRef<IValue> arguments) {
  Stack small = arguments.vec();
  for (IValue& value : small) {
    value = value.isInt() ? IValue{1} : mapTensors(value, [](const Tensor& tensor) {
      return at::empty(c10::DimVector(toSize(tensor.dim()), 1), tensor.options().device(c10::kCPU));
    });
  }
  return small;
}

// Returns the arguments of a convolution with small sizes and one group. There are 16 examples, because oneDNN computes
// large convolutions, but not small ones of fewer examples (`ConvParams::use_mkldnn()`). Kernels have two pixels if
// they had more, and there is a border if there was one: this decides which functions other libraries call.
Stack withSmallConvolution(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr int64_t kExamples = 16;
  const bool is_transposed = argumentNamed(op, arguments, "transposed").toBool();
  const auto dilation = argumentNamed(op, arguments, "dilation").toIntVector();
  auto padding = argumentNamed(op, arguments, "padding").toIntVector();
  for (int64_t& width : padding) {
    width = is_transposed ? 0 : std::min<int64_t>(width, 1);
  }
  Stack small = withOnes(arguments);
  c10::DimVector input(small[0].toTensor().sizes());
  c10::DimVector weight(small[1].toTensor().sizes());
  input[0] = kExamples;
  for (const auto i : c10::irange(std::size_t{2}, weight.size())) {
    weight[i] = std::min<int64_t>(arguments[1].toTensor().sizes()[i], 2);
    input[i] = is_transposed ? 1 : 1 + (weight[i] - 1) * dilation[std::min(i - 2, dilation.size() - 1)];
  }
  small[0] = at::empty(input, small[0].toTensor().options());
  small[1] = at::empty(weight, small[1].toTensor().options());
  small[toSize(findArgument(op.schema(), "padding"))] = std::move(padding);
  return small;
}

// Tries out group normalization on one group of one element, which reveals errors about dtypes.
RealResults tryOutOneGroup(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr std::array<std::string_view, 2> kNormalizes{"aten::native_group_norm", "aten::native_group_norm_backward"};
  return isAmong(kNormalizes, op.schema().name())
             ? RealResults{raiseOrReturn(op, arguments, outcomeOf(op, withOnes(arguments), {}))}
             : RealResults{};
}

// A convolution with smaller sizes is often invalid, because its sizes depend on each other and on number arguments.
// They do not affect which dtypes may be mixed, and which `output_padding` a stride allows.
RealResults tryOutSmallConvolution(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (hasTensor(arguments, [](const Tensor& tensor) { return tensor.numel() == 0; })) {
    return {};
  }
  const Stack small = withSmallConvolution(op, arguments);
  Outcome outcome = outcomeOf(op, small, {});
  return {raiseOrReturn(op, arguments, std::move(outcome))};
}

// `results` is empty for a call that has no results because it needs values.
RealResults tryOutScaled(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results, double size) {
  if (checksAlignment(op)) {
    return {};
  }
  if (isConvolution(op)) {
    return tryOutSmallConvolution(op, arguments);
  }
  if (trustOf(op) == Trust::kSizes) {
    return size <= kModest ? tryOutAtOwnSize(op, arguments) : tryOutOneGroup(op, arguments);
  }
  const SizeScale scale = scaleFor(op, arguments, results, kCheap);
  if (countElements(arguments, scale) + countElements(results, scale) > kAffordable) {
    return {};
  }
  Substitution pairs;
  const Stack scaled = standInsOf(op, arguments, {Fill::kZeros, Dtypes::kKept, scale}, pairs);
  const CallKey key{op, scaled};
  const std::size_t hash = key.hash();
  if (key.isComplete() && hasPassed(hash)) {
    return {};
  }
  Outcome outcome = outcomeOf(op, arguments, {Fill::kIdentity, Dtypes::kKept, scale});
  if (!outcome.refusal) {
    RealResults real{std::move(outcome.results), /*has_sizes=*/false};
    if (key.isComplete() && (results.empty() || agrees(real, op, results))) {
      rememberPassed(hash);
    }
    return real;
  }
  if (passesWithOtherDtypes(op, arguments, scale)) {
    return {raiseOrReturn(op, arguments, std::move(outcome))};
  }
  if (countElements(arguments, {}) > kAffordable) {
    return {};
  }
  const AllocationLimit limit{kMostBytes};
  return tryOutAtOwnSize(op, arguments);
}

// Returns the arguments of a factory with every size limited to 1, if it has a list of numbers as argument `size`.
// Errors in the other arguments remain.
std::optional<Stack> withSmallSize(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const IValue& requested = argumentNamed(op, arguments, "size");
  if (!requested.isIntList()) {
    return std::nullopt;
  }
  std::vector<int64_t> sizes = requested.toIntVector();
  std::transform(sizes.begin(), sizes.end(), sizes.begin(), [](int64_t size) { return std::min<int64_t>(size, 1); });
  Stack small = arguments.vec();
  small[toSize(findArgument(op.schema(), "size"))] = std::move(sizes);
  return small;
}

// Returns the number of elements that the argument `size` requests, or 0 if there is no such argument.
double countRequested(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const IValue& requested = argumentNamed(op, arguments, "size");
  if (!requested.isIntList()) {
    return 0;
  }
  const std::vector<int64_t> sizes = requested.toIntVector();
  return std::accumulate(sizes.begin(), sizes.end(), 1.0,
                         [](double count, int64_t size) { return count * static_cast<double>(size); });
}

// Returns the arguments of a recurrent layer with all sizes except for the gates set to 1. oneDNN refuses dtypes
// regardless of the sizes, and a layer is slow: each step multiplies all weights.
std::optional<Stack> withSmallLayer(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr std::size_t kFirstWeight = 1;
  constexpr std::size_t kLastWeight = 4;
  const auto hidden = toSize(findArgument(op.schema(), "hidden_size"));
  const int64_t hidden_size = arguments[hidden].toInt();
  if (hidden_size < 1 || hasTensor(arguments, [](const Tensor& tensor) { return tensor.numel() == 0; })) {
    return std::nullopt;
  }
  Stack small = arguments.vec();
  for (const auto i : c10::irange(small.size())) {
    small[i] = mapTensors(small[i], [&](const Tensor& tensor) {
      c10::DimVector sizes(toSize(tensor.dim()), 1);
      if (i >= kFirstWeight && i <= kLastWeight && tensor.dim() > 0) {
        sizes[0] = tensor.size(0) / hidden_size;
      }
      return at::empty(sizes, tensor.options().device(c10::kCPU));
    });
  }
  small[hidden] = 1;
  return small;
}

RealResults tryOutAffordably(const OperatorHandle& op,
                             ArrayRef<IValue> arguments,
                             ArrayRef<IValue> results,
                             double size) {
  if (size <= kCheap) {
    return tryOutAtOwnSize(op, arguments);
  }
  const bool is_factory = makesTensorsWithoutTensors(op);
  const bool is_layer = op.schema().name() == "aten::mkldnn_rnn_layer";
  if (!is_factory && !is_layer) {
    return tryOutScaled(op, arguments, results, size);
  }
  const auto small = is_factory ? withSmallSize(op, arguments) : withSmallLayer(op, arguments);
  Stack values = small ? raiseOrReturn(op, *small, outcomeOf(op, *small, {})) : Stack{};
  return is_factory ? RealResults{std::move(values)} : RealResults{};
}

// Returns the largest integer among the arguments. It may be a size that exceeds memory, such as `minlength` of
// `bincount()`.
double largestNumber(ArrayRef<IValue> arguments) {
  double largest = 0;
  for (const IValue& value : arguments) {
    if (value.isInt()) {
      largest = std::max(largest, static_cast<double>(value.toInt()));
    }
  }
  return largest;
}

// Returns the results of real tensors on the CPU, or nothing if a trial is impossible or needs more than
// `max_elements`. Raises the refusal.
RealResults resultsOfReal(const OperatorHandle& op, ArrayRef<IValue> arguments, double max_elements) {
  const double size = std::max({countElements(arguments, {}), countRequested(op, arguments), largestNumber(arguments)});
  if (!canBeTriedOut(op, arguments) || size > max_elements) {
    return {};
  }
  Trial trial;
  Outcome outcome = outcomeOf(op, arguments, {});
  const bool are_new = outcome.are_new;
  Stack values = raiseOrReturn(op, arguments, std::move(outcome));
  return {std::move(values), /*has_sizes=*/true, trial.takeWarnings(), are_new};
}

// Raises the dispatcher's error for an ATen operator that has a Meta kernel but no CPU kernel: `mm.dtype`.
void refuseWithoutCpuKernel(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const bool is_on_cpu =
      hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_cpu(); }) &&
      !hasTensor(arguments, [](const Tensor& tensor) { return !tensor.is_cpu() || !isPlain(tensor); });
  if (is_on_cpu && namespaceOf(op.operator_name()) == "aten" && !op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    Stack stack = arguments.vec();
    op.redispatchBoxed(DispatchKeySet{DispatchKey::CPU}, &stack);
  }
}

RealResults tryOutAfterMeta(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  refuseWithoutCpuKernel(op, arguments);
  // The same kernels make views on all devices, including the meta device.
  if (!canBeTriedOut(op, arguments) || onlyMakesViews(op)) {
    return {};
  }
  Trial trial;
  const auto returned = results.slice(0, op.schema().returns().size());
  RealResults real =
      tryOutAffordably(op, arguments, results, countElements(arguments, {}) + countElements(returned, {}));
  real.warnings = trial.takeWarnings();
  return real;
}

// The call is most likely correct.
RealResults tryOutWithoutValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  RealResults real = resultsOfReal(op, arguments, kCheap);
  const double size = countElements(arguments, {});
  const bool is_untried = real.values.empty() && canBeTriedOut(op, arguments) && !makesTensorsWithoutTensors(op);
  if (is_untried && size > kCheap && largestNumber(arguments) <= kAffordable) {
    const Trial trial;
    tryOutScaled(op, arguments, {}, size);
  }
  return real;
}

RealResults tryOut(TrialReason reason, const OperatorHandle& op, Arguments arguments, Arguments meta_results) {
  switch (reason) {
    case TrialReason::kMetaKernelAccepts:
      return tryOutAfterMeta(op, arguments, meta_results);
    case TrialReason::kMetaKernelRefuses:
      return resultsOfReal(op, arguments, kAffordable);
    case TrialReason::kInsteadOfPython: {
      const AllocationLimit limit{kSmallBytes};  // without results if the kernel allocates a large one
      return resultsOfReal(op, arguments, kCheap);
    }
    case TrialReason::kNeedsValues:
      break;
  }
  return tryOutWithoutValues(op, arguments);
}

}  // namespace

void registerKernelTrials() {
  KernelTrials& trials = hooks().trials;
  trials.tryOut = &tryOut;
  trials.refuseOverlap = &refuseOverlap;
  trials.correct = &correctByReal;
  trials.correctStrides = &correctStridesByReal;
  trials.stridesLike = &stridesLike;
  trials.mayRunOnZeros = &mayRunOnZeros;
  trials.describeOnZeros = &describeOnZeros;
}

}  // namespace torchext
