#include "refusals.h"

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../../support/locks.h"
#include "../../support/no_warnings.h"
#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../../torch_internals/dispatcher_internals.h"
#include "../../torch_internals/error_texts.h"
#include "../cache/call_key.h"
#include "../calls/hidden_keys.h"
#include "../calls/op_traits.h"
#include "convolutions.h"
#include "device_rules.h"
#include "real_results.h"
#include "stand_ins.h"

namespace torchext {

using at::Tensor;
using c10::ArrayRef;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// The most elements that arguments and results together may have in a trial:
constexpr double kCheap = 32768;          // for a call that will most probably pass
constexpr double kAffordable = 33554432;  // for a call that will most probably be refused
constexpr int64_t kLargestDivisor = 1099511627776;

// The kernels of these expect values that no fill provides: lengths that add up to a size; enough pivots; zero points
// between two numbers that are arguments; diagonals that differ.
constexpr std::array<std::string_view, 5> kExpectsValues{
    "aten::segment_reduce", "aten::lu_unpack", "aten::fake_quantize_per_channel_affine",
    "aten::fake_quantize_per_channel_affine_cachemask", "aten::_spdiags"};

// The kernels of these require strides that are a multiple of some number of bytes, which divided sizes do not have.
constexpr std::array<std::string_view, 4> kChecksAlignment{"aten::_grouped_mm", "aten::_scaled_grouped_mm",
                                                           "aten::_scaled_mm", "aten::_scaled_mm_v2"};

bool checksAlignment(const OperatorHandle& op) {
  return isAmong(kChecksAlignment, op.schema().name());
}

bool expectsValues(const OperatorHandle& op) {
  return isAmong(kExpectsValues, op.schema().name());
}

// Returns true for operators that do not check what an earlier call has computed for them, such as a forward for its
// backward, or a library for itself: buffers, which Meta kernels make of any size, and positions. Their kernels trust
// these, and could write anywhere.
bool trustsArguments(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.find("_backward") != std::string::npos || name.find("mkldnn_rnn") != std::string::npos ||
         name.find("fbgemm") != std::string::npos || name.find("pack") != std::string::npos;
}

bool isReplaceable(const Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && isPlain(tensor) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !tensor.key_set().has_any(DispatchKeySet({DispatchKey::Python, DispatchKey::ZeroTensor}));
}

bool canStandIn(const IValue& value) {
  if (value.isSymInt() || value.isSymFloat() || value.isSymBool() || value.isStorage() || value.isObject()) {
    return false;
  }
  if (value.isDevice()) {
    return value.toDevice().is_cpu();
  }
  bool can = true;
  forEachTensor(value, [&can](const Tensor& tensor) { can = can && isReplaceable(tensor); });
  return can;
}

// Returns true for the operator that opens a file, and creates it if there is none.
bool hasEffects(const OperatorHandle& op) {
  return op.schema().name() == "aten::from_file";
}

// Returns true for operators that make tensors from nothing. They may be asked for sizes for which there is no memory.
bool makesTensorsOfNothing(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return takesTensorOptions(op.schema()) || op.hasKernelForDispatchKey(DispatchKey::BackendSelect) ||
         std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
           return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                  argument.type()->isSubtypeOf(*c10::ListType::ofTensors()) ||
                  argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors());
         });
}

const c10::KernelFunction& cpuKernelOf(const OperatorHandle& op) {
  return operatorEntry(op).lookup(DispatchKeySet{DispatchKey::CPU});
}

// Returns true if the CPU kernel is PyTorch's own. An unboxed kernel is written in C++; kernels that users register in
// Python are boxed.
bool isKernelOfPyTorchs(const OperatorHandle& op) {
  return namespaceOf(op.operator_name()) == "aten" && op.hasComputedKernelForDispatchKey(DispatchKey::CPU) &&
         (cpuKernelOf(op).isValidUnboxed() || cpuKernelOf(op).isValidSymUnboxed());
}

bool isOnCuda(ArrayRef<IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_cuda(); });
}

// Returns true if the arguments are on several devices. A tensor without dimensions may always be on the CPU.
bool mixesDevices(ArrayRef<IValue> arguments) {
  std::optional<c10::Device> common;
  bool mixes = false;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (!tensor.is_cpu() || tensor.dim() > 0) {
      mixes = mixes || (common && *common != tensor.device());
      common = tensor.device();
    }
  });
  return mixes;
}

bool canBeTriedOut(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  return isKernelOfPyTorchs(op) && !op.hasTag(at::Tag::inplace_view) &&
         (!op.hasTag(at::Tag::nondeterministic_seeded) || takesGenerator(op)) && !expectsValues(op) &&
         !hasEffects(op) && !trustsArguments(op) && std::all_of(arguments.begin(), arguments.end(), canStandIn) &&
         !mixesDevices(arguments);
}

// What a kernel has raised.
struct Refusal {
  std::exception_ptr error;
  std::string message;

  // Returns the message with the backtrace. Looking up the names of functions for it takes milliseconds.
  std::string messageAndOrigin() const {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& raised) {
      return raised.what();
    }
  }
};

// The outcome of a trial: a refusal; or results; or, if it shows neither, nothing.
struct Outcome {
  std::optional<Refusal> refusal;
  Stack results;
};

Outcome tryOut(const OperatorHandle& op, ArrayRef<IValue> arguments, const Likeness& likeness) {
  try {
    Stack stack = standInsOf(op, arguments, likeness);
    op.redispatchBoxed(DispatchKeySet{DispatchKey::CPU}, &stack);
    return {std::nullopt, std::move(stack)};
  } catch (const c10::OutOfMemoryError&) {
    return {};
  } catch (const c10::Error& error) {
    std::string message = error.what_without_backtrace();
    return isOutOfMemory(message) ? Outcome{} : Outcome{Refusal{std::current_exception(), std::move(message)}, {}};
  } catch (const std::bad_alloc&) {
    return {};
  } catch (const std::exception& error) {
    return {Refusal{std::current_exception(), error.what()}, {}};
  }
}

constexpr std::array<Fill, 3> kFills{Fill::kIdentity, Fill::kOnes, Fill::kZeros};

bool passes(const OperatorHandle& op, ArrayRef<IValue> arguments, Likeness likeness) {
  return std::any_of(kFills.begin(), kFills.end(), [&](Fill fill) {
    likeness.fill = fill;
    return !tryOut(op, arguments, likeness).refusal;
  });
}

bool passesWithOtherDtypes(const OperatorHandle& op, ArrayRef<IValue> arguments, int64_t divisor) {
  return passes(op, arguments, {Fill::kIdentity, Dtypes::kCommon, divisor}) ||
         passes(op, arguments, {Fill::kIdentity, Dtypes::kFloat, divisor});
}

// Returns the refusal that does not depend on values, or results. If the errors for different fills differ, some are
// about values; but the first one is not if the call passes with other dtypes.
Outcome outcomeOf(const OperatorHandle& op, ArrayRef<IValue> arguments, Likeness likeness) {
  std::optional<Refusal> first;
  bool is_same = true;
  for (const Fill fill : kFills) {
    likeness.fill = fill;
    Outcome outcome = tryOut(op, arguments, likeness);
    if (!outcome.refusal) {
      return outcome;
    }
    if (!first) {
      first = std::move(outcome.refusal);
    } else {
      is_same = is_same && first->message == outcome.refusal->message;
    }
  }
  return is_same || passesWithOtherDtypes(op, arguments, likeness.divisor) ? Outcome{std::move(first), {}} : Outcome{};
}

// Where checks are that CPU kernels share with CUDA kernels: those of structured kernels, of elementwise ones, of typed
// access to data, and of `dot`. The text of an error says where it was raised.
constexpr std::array<std::string_view, 7> kSharedChecks{"raised from meta at", "raised from dot_check at",
                                                        "/ATen/ExpandUtils.",  "/TensorIterator.cpp",
                                                        "/TensorMethods.cpp",  "/WrapDim",
                                                        "/ReduceAllOps.cpp"};

bool isShared(const Refusal& refusal) {
  const std::string text = refusal.messageAndOrigin();
  return std::any_of(kSharedChecks.begin(), kSharedChecks.end(),
                     [&text](std::string_view origin) { return text.find(origin) != std::string::npos; });
}

// Checks of dtypes that CUDA kernels make, too, but with another message.
struct OtherWords {
  std::string_view begin_on_cpu;
  std::string_view begin_on_cuda;
};

constexpr std::array<OtherWords, 1> kOtherWords{{
    // `addmm_impl_cpu_()` (LinearAlgebra.cpp) and `addmm_out_cuda_impl()` (cuda/Blas.cpp)
    {"expected m1 and m2 to have the same dtype", "expected mat1 and mat2 to have the same dtype"},
}};

// Raises what CUDA would raise for a call that the CPU refuses. Returns if the check is not one that they share: the
// CUDA kernel may accept the call, for example because of its dtype.
void raiseForCuda(const OperatorHandle& op, ArrayRef<IValue> arguments, const Refusal& refusal) {
  if (isConvolution(op)) {
    // `check_input_same_type_as_parameters()` (Convolution.cpp)
    const Tensor& input = arguments[0].toTensor();
    const Tensor& weight = arguments[1].toTensor();
    TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "Input type (torch.cuda.", input.scalar_type(),
                "Tensor) and weight type (torch.cuda.", weight.scalar_type(), "Tensor) should be the same");
  }
  if (refusal.message.rfind("mixed dtype (CPU)", 0) == 0) {
    // CUDA kernels of normalizations read their parameters in the dtype of the input (layer_norm_kernel.cu).
    forEachTensor(arguments, [&arguments](const Tensor& parameter) {
      const auto expected = arguments[0].toTensor().scalar_type();
      TORCH_CHECK(parameter.scalar_type() == expected, "expected scalar type ", expected, " but found ",
                  parameter.scalar_type());
    });
  }
  if (isShared(refusal)) {
    std::rethrow_exception(refusal.error);
  }
  for (const OtherWords& words : kOtherWords) {
    const std::size_t length = words.begin_on_cpu.size();
    TORCH_CHECK(refusal.message.compare(0, length, words.begin_on_cpu) != 0, words.begin_on_cuda,
                refusal.message.substr(std::min(length, refusal.message.size())));
  }
}

// Raises the refusal if there is one. Otherwise returns the results, if there are any.
Stack raiseOrReturn(const OperatorHandle& op, ArrayRef<IValue> arguments, Outcome outcome) {
  if (outcome.refusal && isOnCuda(arguments)) {
    raiseForCuda(op, arguments, *outcome.refusal);
  } else if (outcome.refusal) {
    std::rethrow_exception(outcome.refusal->error);
  }
  return std::move(outcome.results);
}

// The scaled calls that have passed, for all threads. Many calls of different sizes become the same when scaled.
class Passed {
 public:
  bool has(std::size_t hash) {
    const Locked lock{LockRank::kRefusals};
    return hashes_.count(hash) != 0;
  }

  void add(std::size_t hash) {
    const Locked lock{LockRank::kRefusals};
    if (hashes_.size() == kMax) {
      hashes_.clear();
    }
    hashes_.insert(hash);
  }

 private:
  static constexpr std::size_t kMax = 16384;
  std::unordered_set<std::size_t> hashes_;
};

Passed& passed() {
  static auto* passed = new Passed;  // leaked: threads may run operators until the process ends
  return *passed;
}

// Returns the smallest power of two that makes the call cheap, or 0.
int64_t divisorFor(ArrayRef<IValue> arguments) {
  for (int64_t divisor = 2; divisor <= kLargestDivisor; divisor *= 2) {
    if (countElements(arguments, divisor) <= kCheap) {
      return divisor;
    }
  }
  return 0;
}

// This function and the next ones raise the refusal, or return the results of the trial, if there are any.
Stack tryOutScaled(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results, double size) {
  const int64_t divisor = checksAlignment(op) ? 0 : divisorFor(arguments);
  if (divisor == 0) {
    return {};
  }
  const Stack scaled = standInsOf(op, arguments, {Fill::kZeros, Dtypes::kKept, divisor});
  const CallKey key{op, scaled};
  const std::size_t hash = key.hash();
  if (key.isComplete() && passed().has(hash)) {
    return {};
  }
  Outcome outcome = outcomeOf(op, arguments, {Fill::kIdentity, Dtypes::kKept, divisor});
  if (!outcome.refusal) {
    if (key.isComplete() && agrees({outcome.results, false}, op, results)) {
      passed().add(hash);
    }
    return std::move(outcome.results);
  }
  if (passesWithOtherDtypes(op, arguments, divisor)) {
    return raiseOrReturn(op, arguments, std::move(outcome));
  }
  // A convolution with all sizes divided is often invalid, because its sizes depend on each other and on number
  // arguments.
  const bool is_affordable = size <= kAffordable && !isConvolution(op);
  return is_affordable ? raiseOrReturn(op, arguments, outcomeOf(op, arguments, {})) : Stack{};
}

// Returns the position of the argument `size`, if it is a list of numbers.
std::optional<std::size_t> requestedSize(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const int position = findArgument(op.schema(), "size");
  const bool is_list = position >= 0 && arguments[static_cast<std::size_t>(position)].isIntList();
  return is_list ? std::optional{static_cast<std::size_t>(position)} : std::nullopt;
}

// Returns the arguments of a factory with every size cut to at most 1, if it has an argument `size`. Errors in the
// other arguments remain.
std::optional<Stack> withSmallSize(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto position = requestedSize(op, arguments);
  if (!position) {
    return std::nullopt;
  }
  Stack small = arguments.vec();
  std::vector<int64_t> sizes = small[*position].toIntVector();
  std::transform(sizes.begin(), sizes.end(), sizes.begin(), [](int64_t size) { return std::min<int64_t>(size, 1); });
  small[*position] = std::move(sizes);
  return small;
}

// Returns the number of elements that the argument `size` asks for, or 0 if there is no such argument.
double countRequested(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto position = requestedSize(op, arguments);
  if (!position) {
    return 0;
  }
  const std::vector<int64_t> sizes = arguments[*position].toIntVector();
  return std::accumulate(sizes.begin(), sizes.end(), 1.0,
                         [](double count, int64_t size) { return count * static_cast<double>(size); });
}

Stack tryOutFactory(const OperatorHandle& op, ArrayRef<IValue> arguments, double size) {
  if (size <= kCheap) {
    return raiseOrReturn(op, arguments, outcomeOf(op, arguments, {}));
  }
  const auto small = withSmallSize(op, arguments);
  return small ? raiseOrReturn(op, *small, outcomeOf(op, *small, {})) : Stack{};
}

Stack tryOutAffordably(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results, double size) {
  if (makesTensorsOfNothing(op)) {
    return tryOutFactory(op, arguments, size);
  }
  return size <= kCheap ? raiseOrReturn(op, arguments, outcomeOf(op, arguments, {}))
                        : tryOutScaled(op, arguments, results, size);
}

// The state of the thread in which kernels are tried out.
class Trial {
 public:
  Trial() = default;

 private:
  const c10::impl::ExcludeDispatchKeyGuard keys_{kHiddenFromUsers};
  const NoWarnings no_warnings_;
};

// Returns the largest integer among the arguments. It may be a size for which there is no memory, as `minlength` of
// `bincount()` is.
double largestNumber(ArrayRef<IValue> arguments) {
  double largest = 0;
  for (const IValue& value : arguments) {
    if (value.isInt()) {
      largest = std::max(largest, static_cast<double>(value.toInt()));
    }
  }
  return largest;
}

// Returns true if real tensors on the CPU accept the call, and false if this cannot be told, or takes more than
// `max_elements`. Raises the refusal.
bool isAcceptedByReal(const OperatorHandle& op, ArrayRef<IValue> arguments, double max_elements) {
  const double size = std::max({countElements(arguments, 1), countRequested(op, arguments), largestNumber(arguments)});
  if (!canBeTriedOut(op, arguments) || size > max_elements) {
    return false;
  }
  const Trial trial;
  return !raiseOrReturn(op, arguments, outcomeOf(op, arguments, {})).empty();
}

}  // namespace

RealResults refuseAsReal(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (isConvolution(op)) {
    const Trial trial;
    checkShapesOfConvolution(arguments);
  }
  // Views are made by the same kernels on all devices, including the meta device.
  if (!canBeTriedOut(op, arguments) || onlyMakesViews(op)) {
    return {};
  }
  const Trial trial;
  const double size = countElements(arguments, 1) + countElements(results, 1);
  return {tryOutAffordably(op, arguments, results, size), /*has_sizes=*/size <= kCheap};
}

bool refuseAsReal(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  return isAcceptedByReal(op, arguments, kAffordable);
}

void refuseAsRealIfCheap(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  isAcceptedByReal(op, arguments, kCheap);
}

}  // namespace torchext
