#include "refusals.h"

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../plain_tensors.h"
#include "../stack_utils.h"
#include "call_key.h"
#include "device_rules.h"
#include "hidden_keys.h"
#include "kernel_identity.h"
#include "op_traits.h"
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

// Elements of arguments and results together.
constexpr double kCheap = 32768;          // for a call that will most probably pass
constexpr double kAffordable = 33554432;  // for a call that will most probably be refused
constexpr int64_t kLargestDivisor = 1099511627776;

// Their kernels expect values that no fill has: lengths that add up to a size; pivots, of which there must be enough;
// zero points between two numbers that are arguments; diagonals that differ.
constexpr std::array<std::string_view, 5> kExpectsValues{
    "aten::segment_reduce", "aten::lu_unpack", "aten::fake_quantize_per_channel_affine",
    "aten::fake_quantize_per_channel_affine_cachemask", "aten::_spdiags"};

// Their kernels want strides that are a multiple of some bytes, which sizes that are divided are not.
constexpr std::array<std::string_view, 4> kChecksAlignment{"aten::_grouped_mm", "aten::_scaled_grouped_mm",
                                                           "aten::_scaled_mm", "aten::_scaled_mm_v2"};

bool checksAlignment(const OperatorHandle& op) {
  return std::find(kChecksAlignment.begin(), kChecksAlignment.end(), op.schema().name()) != kChecksAlignment.end();
}

bool expectsValues(const OperatorHandle& op) {
  return std::find(kExpectsValues.begin(), kExpectsValues.end(), op.schema().name()) != kExpectsValues.end();
}

// What is computed forwards tells kernels of gradients, and libraries behind a kernel, more than sizes: buffers of
// their own, which Meta kernels make of any size, and positions. They trust it, and write where it leads them.
bool trustsArguments(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.find("_backward") != std::string::npos || name.find("mkldnn_rnn") != std::string::npos ||
         name.find("fbgemm") != std::string::npos || name.find("pack") != std::string::npos;
}

// Of the calls with all sizes divided these are often wrong, because sizes depend on each other and on numbers.
bool isConvolution(const OperatorHandle& op) {
  return op.schema().name() == "aten::convolution";
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

// Opens a file, and makes it if there is none.
bool hasEffects(const OperatorHandle& op) {
  return op.schema().name() == "aten::from_file";
}

// Those that make tensors of nothing are asked for sizes that nobody has to have memory for.
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

// A kernel that is not boxed is written in C++. What the user registers in Python is.
bool isKernelOfPyTorchs(const OperatorHandle& op) {
  return namespaceOf(op.operator_name()) == "aten" && op.hasComputedKernelForDispatchKey(DispatchKey::CPU) &&
         (cpuKernelOf(op).isValidUnboxed() || cpuKernelOf(op).isValidSymUnboxed());
}

bool isOnCuda(ArrayRef<IValue> arguments) {
  bool is_on_cuda = false;
  forEachTensor(arguments, [&](const Tensor& tensor) { is_on_cuda = is_on_cuda || tensor.is_cuda(); });
  return is_on_cuda;
}

// A number may be on the CPU.
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

class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

// What a kernel has raised.
struct Refusal {
  std::exception_ptr error;
  std::string message;

  // Looking up the names of functions for this takes milliseconds.
  std::string messageAndOrigin() const {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& raised) {
      return raised.what();
    }
  }
};

bool isOutOfMemory(const std::string& message) {
  return message.find("allocate memory") != std::string::npos;
}

std::optional<Refusal> tryOut(const OperatorHandle& op, ArrayRef<IValue> arguments, const Likeness& likeness) {
  try {
    Stack stack = standInsOf(op, arguments, likeness);
    op.redispatchBoxed(DispatchKeySet{DispatchKey::CPU}, &stack);
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  } catch (const c10::Error& error) {
    std::string message = error.what_without_backtrace();
    return isOutOfMemory(message) ? std::nullopt : std::optional{Refusal{std::current_exception(), std::move(message)}};
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  } catch (const std::exception& error) {
    return Refusal{std::current_exception(), error.what()};
  }
  return std::nullopt;
}

constexpr std::array<Fill, 3> kFills{Fill::kIdentity, Fill::kOnes, Fill::kZeros};

bool passes(const OperatorHandle& op, ArrayRef<IValue> arguments, Likeness likeness) {
  return std::any_of(kFills.begin(), kFills.end(), [&](Fill fill) {
    likeness.fill = fill;
    return !tryOut(op, arguments, likeness);
  });
}

bool passesWithOtherDtypes(const OperatorHandle& op, ArrayRef<IValue> arguments, int64_t divisor) {
  return passes(op, arguments, {Fill::kIdentity, Dtypes::kCommon, divisor}) ||
         passes(op, arguments, {Fill::kIdentity, Dtypes::kFloat, divisor});
}

// What the kernel raises whatever the values are, and nothing when it passes, or may pass. When its errors differ, some
// of them are about values; but not the first one, if it is the dtypes that matter.
std::optional<Refusal> refusalOf(const OperatorHandle& op, ArrayRef<IValue> arguments, Likeness likeness) {
  std::optional<Refusal> first;
  bool is_same = true;
  for (const Fill fill : kFills) {
    likeness.fill = fill;
    std::optional<Refusal> refusal = tryOut(op, arguments, likeness);
    if (!refusal) {
      return std::nullopt;
    }
    if (!first) {
      first = std::move(refusal);
    } else {
      is_same = is_same && first->message == refusal->message;
    }
  }
  return is_same || passesWithOtherDtypes(op, arguments, likeness.divisor) ? first : std::nullopt;
}

// Checks that kernels for the CPU share with those for CUDA: of structured kernels, of elementwise ones, of typed
// access to data, and of `dot`. Errors tell where they were raised.
constexpr std::array<std::string_view, 7> kSharedChecks{"raised from meta at", "raised from dot_check at",
                                                        "/ATen/ExpandUtils.",  "/TensorIterator.cpp",
                                                        "/TensorMethods.cpp",  "/WrapDim",
                                                        "/ReduceAllOps.cpp"};

bool isShared(const Refusal& refusal) {
  const std::string text = refusal.messageAndOrigin();
  return std::any_of(kSharedChecks.begin(), kSharedChecks.end(),
                     [&text](std::string_view origin) { return text.find(origin) != std::string::npos; });
}

// Checks of dtypes that kernels for CUDA make too, in other words.
struct OtherWords {
  std::string_view begin_on_cpu;
  std::string_view begin_on_cuda;
};

constexpr std::array<OtherWords, 1> kOtherWords{{
    // `addmm_impl_cpu_()` (LinearAlgebra.cpp) and `addmm_out_cuda_impl()` (cuda/Blas.cpp)
    {"expected m1 and m2 to have the same dtype", "expected mat1 and mat2 to have the same dtype"},
}};

// Of what kernels for the CPU refuse, kernels for CUDA may accept what they do not share: a dtype, above all.
void raiseForCuda(const OperatorHandle& op, ArrayRef<IValue> arguments, const Refusal& refusal) {
  if (isConvolution(op)) {
    // `check_input_same_type_as_parameters()` (Convolution.cpp)
    const Tensor& input = arguments[0].toTensor();
    const Tensor& weight = arguments[1].toTensor();
    TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "Input type (torch.cuda.", input.scalar_type(),
                "Tensor) and weight type (torch.cuda.", weight.scalar_type(), "Tensor) should be the same");
  }
  if (refusal.message.rfind("mixed dtype (CPU)", 0) == 0) {
    // Kernels of normalizations for CUDA read their parameters in the dtype of the input (layer_norm_kernel.cu).
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

void raise(const OperatorHandle& op, ArrayRef<IValue> arguments, const std::optional<Refusal>& refusal) {
  if (!refusal) {
    return;
  }
  if (isOnCuda(arguments)) {
    raiseForCuda(op, arguments, *refusal);
  } else {
    std::rethrow_exception(refusal->error);
  }
}

// Scaled calls that have passed, for all threads: many calls of different sizes are alike when they are scaled.
class Passed {
 public:
  bool has(std::size_t hash) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return hashes_.count(hash) != 0;
  }

  void add(std::size_t hash) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (hashes_.size() == kMax) {
      hashes_.clear();
    }
    hashes_.insert(hash);
  }

  void lock() {
    mutex_.lock();
  }

  void unlock() {
    mutex_.unlock();
  }

 private:
  static constexpr std::size_t kMax = 16384;
  std::mutex mutex_;
  std::unordered_set<std::size_t> hashes_;
};

Passed& passed() {
  static auto* passed = new Passed;  // leaked: threads may run operators until the process ends
  return *passed;
}

// The smallest power of two that makes the call cheap, or 0.
int64_t divisorFor(ArrayRef<IValue> arguments) {
  for (int64_t divisor = 2; divisor <= kLargestDivisor; divisor *= 2) {
    if (countElements(arguments, divisor) <= kCheap) {
      return divisor;
    }
  }
  return 0;
}

void refuseScaled(const OperatorHandle& op, ArrayRef<IValue> arguments, double size) {
  const int64_t divisor = checksAlignment(op) ? 0 : divisorFor(arguments);
  if (divisor == 0) {
    return;
  }
  const Stack scaled = standInsOf(op, arguments, {Fill::kZeros, Dtypes::kKept, divisor});
  const CallKey key{op, scaled};
  const std::size_t hash = key.hash();
  if (key.isComplete() && passed().has(hash)) {
    return;
  }
  const std::optional<Refusal> error = refusalOf(op, arguments, {Fill::kIdentity, Dtypes::kKept, divisor});
  if (!error) {
    if (key.isComplete()) {
      passed().add(hash);
    }
  } else if (passesWithOtherDtypes(op, arguments, divisor)) {
    raise(op, arguments, error);
  } else if (size <= kAffordable && !isConvolution(op)) {
    raise(op, arguments, refusalOf(op, arguments, {}));
  }
}

// PyTorch checks the shapes of a convolution where it chooses the kernel, which it does for each device but not for the
// meta device.
void checkShapesOfConvolution(ArrayRef<IValue> arguments) {
  const auto on_meta = [](const Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  };
  const auto original_bias = arguments[2].toOptional<Tensor>();
  const auto bias = original_bias && original_bias->defined() ? std::optional{on_meta(*original_bias)} : std::nullopt;
  const auto numbers = [&](std::size_t position) { return arguments[position].toSymIntVector(); };
  at::native::select_conv_backend(on_meta(arguments[0].toTensor()), on_meta(arguments[1].toTensor()), bias, numbers(3),
                                  numbers(4), numbers(5), arguments[6].toBool(), numbers(7), arguments[8].toSymInt(),
                                  bias ? at::OptionalSymIntArrayRef(bias->sym_sizes()) : std::nullopt);
}

// The position of the argument `size`, if it is a list of numbers.
std::optional<std::size_t> requestedSize(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const int position = findArgument(op.schema(), "size");
  const bool is_list = position >= 0 && arguments[static_cast<std::size_t>(position)].isIntList();
  return is_list ? std::optional{static_cast<std::size_t>(position)} : std::nullopt;
}

// The arguments of a factory that is asked for no more than one element, if its argument `size` tells how many there
// are. What is wrong with the other arguments is wrong with them then, too.
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

// How many elements it is asked for, if its argument `size` tells.
double countRequested(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto position = requestedSize(op, arguments);
  if (!position) {
    return 0;
  }
  const std::vector<int64_t> sizes = arguments[*position].toIntVector();
  return std::accumulate(sizes.begin(), sizes.end(), 1.0,
                         [](double count, int64_t size) { return count * static_cast<double>(size); });
}

void refuseFactory(const OperatorHandle& op, ArrayRef<IValue> arguments, double size) {
  if (size <= kCheap) {
    raise(op, arguments, refusalOf(op, arguments, {}));
  } else if (const auto small = withSmallSize(op, arguments)) {
    raise(op, *small, refusalOf(op, *small, {}));
  }
}

// The state of the thread in which kernels are tried out.
class Trial {
 public:
  Trial() = default;

 private:
  const c10::impl::ExcludeDispatchKeyGuard keys_{kHiddenFromUsers};
  NoWarnings no_warnings_;
  const c10::WarningUtils::WarningHandlerGuard warnings_{&no_warnings_};
};

}  // namespace

void refuseAsReal(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (isConvolution(op)) {
    const Trial trial;
    checkShapesOfConvolution(arguments);
  }
  // Views are made by the same kernels for all devices, the meta device among them.
  if (!canBeTriedOut(op, arguments) || onlyMakesViews(op)) {
    return;
  }
  const Trial trial;
  const double size = countElements(arguments, 1) + countElements(results, 1);
  if (makesTensorsOfNothing(op)) {
    refuseFactory(op, arguments, size);
  } else if (size <= kCheap) {
    raise(op, arguments, refusalOf(op, arguments, {}));
  } else {
    refuseScaled(op, arguments, size);
  }
}

void refuseAsReal(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (canBeTriedOut(op, arguments) &&
      std::max(countElements(arguments, 1), countRequested(op, arguments)) <= kAffordable) {
    const Trial trial;
    raise(op, arguments, refusalOf(op, arguments, {}));
  }
}

void lockRefusals() {
  passed().lock();
}

void unlockRefusals() {
  passed().unlock();
}

}  // namespace torchext
