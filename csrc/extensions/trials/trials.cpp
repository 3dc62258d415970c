#include "trials.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/DimVector.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/torch_internals/dispatcher_internals.h"
#include "../../core/torch_internals/error_texts.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/pointer_numbers.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/kernel_threads.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// The hashes of the trials that have passed, guarded by `LockRank::kRefusals`. Many calls of different sizes become
// equal when scaled. Leaked: threads may run operators until the process ends.
std::unordered_set<std::size_t>& passed() {
  static auto* hashes = new std::unordered_set<std::size_t>;
  return *hashes;
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

// Returns true for the operator that opens a file, and creates it if it does not exist.
bool hasEffects(const OperatorHandle& op) {
  return op.schema().name() == "aten::from_file";
}

bool haveElements(ArrayRef<IValue> arguments) {
  return !hasTensor(arguments, [](const Tensor& tensor) { return tensor.numel() == 0; });
}

// (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, is_training, ...). The values that the
// forward operator saved are read only in training, and are empty otherwise.
bool haveStatistics(ArrayRef<IValue> arguments) {
  constexpr std::size_t kFirst = 2;
  constexpr std::size_t kSaved = 5;
  constexpr std::size_t kIsTraining = 7;
  const Tensor& input = arguments[1].toTensor();
  const std::size_t end = arguments[kIsTraining].toBool() ? kIsTraining : kSaved;
  return input.dim() > 1 && !hasTensor(arguments.slice(kFirst, end - kFirst),
                                       [&input](const Tensor& tensor) { return tensor.numel() != input.size(1); });
}

// Returns true if a call with these arguments may be tried out, at its own sizes or at smaller ones.
bool mayBeTriedOut(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  switch (trustOf(op)) {
    case Trust::kBuffers:
      return false;
    case Trust::kIndices:
      return haveElements(arguments) && !isOnCuda(arguments);
    case Trust::kStatistics:
      return haveStatistics(arguments) && !isOnCuda(arguments);
    case Trust::kSizes:
    case Trust::kForward:
      return !isOnCuda(arguments);
    case Trust::kSegments:  // the kernel checks all lengths: see `skipsChecks()`
    case Trust::kNothing:
      break;
  }
  return true;
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

// Returns true if `results` are plain tensors, each alone on a storage of its size.
bool areNew(ArrayRef<IValue> results, ArrayRef<IValue> arguments) {
  PointerNumbers storages;
  forEachTensor(arguments, [&](const Tensor& tensor) { storages.add(tensor.storage().unsafeGetStorageImpl()); });
  return std::all_of(results.begin(), results.end(),
                     [](const IValue& value) { return value.isTensor() || value.isTensorList(); }) &&
         allTensors(results, [&](const Tensor& tensor) {
           return isPlain(tensor) && !tensor.key_set().has_any(kLazyBits) && tensor.storage_offset() == 0 &&
                  tensor.storage().nbytes() == neededBytes(tensor) &&
                  storages.add(tensor.storage().unsafeGetStorageImpl()).second;
         });
}

at::native::ConvBackend backendOf(ArrayRef<IValue> arguments) {
  const auto numbers = [&arguments](std::size_t i) { return arguments[i].toSymIntVector(); };
  return at::native::select_conv_backend(arguments[0].toTensor(), arguments[1].toTensor(),
                                         arguments[2].toOptional<Tensor>(), numbers(3), numbers(4), numbers(5),
                                         arguments[6].toBool(), numbers(7), arguments[8].toSymInt(), std::nullopt);
}

// On one thread, PyTorch may choose another library for a convolution (`ConvParams::use_mkldnn()`).
bool isSameOnOneThread(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (!isConvolution(op)) {
    return true;
  }
  try {
    const auto backend = backendOf(arguments);
    const OneThread one_thread{true};
    return backend == backendOf(arguments);
  } catch (const std::exception&) {  // for example of wrong dimensions
    return false;
  }
}

Outcome tryOut(const OperatorHandle& op, ArrayRef<IValue> arguments, const Likeness& likeness) {
  try {
    Substitution pairs;
    Stack stack = standInsOf(op, arguments, likeness, pairs);
    const Stack stand_ins = stack;
    const WrittenTensors written{op.schema(), stack};
    {
      const OwnComputation own;
      // Waking OpenMP's threads takes longer than a cheap trial.
      const OneThread one_thread{countElements(stack, {}) <= kCheap && isSameOnOneThread(op, stack)};
      op.redispatchBoxed(DispatchKeySet{DispatchKey::CPU}, &stack);
    }
    const bool are_new = areNew(stack, stand_ins);
    written.appendChanged(stack);
    return {std::nullopt, std::move(stack), are_new};
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

// The number of tensors whose dtype is changed alone. Lists may have thousands.
constexpr std::size_t kMostChanged = 8;

}  // namespace

const OperatorTable<Trust> trustOf{
    "have kernels that trust results of an earlier call",
    {
        {Trust::kBuffers,
         {"aten::mkldnn_rnn_layer_backward",
          "aten::_convert_weight_to_int4pack",
          "aten::_convert_weight_to_int4pack_for_cpu",
          "aten::_dyn_quant_matmul_4bit",
          "aten::_dyn_quant_pack_4bit_weight",
          "aten::_weight_int4pack_mm",
          "aten::_weight_int4pack_mm_for_cpu",
          "aten::_weight_int4pack_mm_with_scales_and_zeros",
          "aten::_weight_int8pack_mm",
          "aten::_ctc_loss_backward",
          "aten::_segment_reduce_backward",
          "aten::_embedding_bag_backward",
          "aten::_embedding_bag_dense_backward",
          "aten::_embedding_bag_per_sample_weights_backward",
          "aten::convolution_backward",
          "aten::convolution_backward_overrideable",
          "aten::_slow_conv2d_backward",
          "aten::_grid_sampler_2d_cpu_fallback_backward",
          "aten::_nnpack_spatial_convolution",
          "aten::masked_scatter_backward"}},
        {Trust::kSizes,
         {"aten::native_group_norm", "aten::native_group_norm_backward", "aten::_fft_c2r", "aten::_cdist_backward",
          "aten::_pdist_backward", "aten::unfold_backward", "aten::slice_backward", "aten::select_backward",
          "aten::diagonal_backward"}},
        {Trust::kIndices,
         {"aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward",
          "aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward",
          "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward",
          "aten::embedding_dense_backward", "aten::nll_loss_backward", "aten::nll_loss2d_backward",
          "aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward"}},
        {Trust::kSegments, {"aten::segment_reduce"}},
        {Trust::kStatistics, {"aten::batch_norm_backward", "aten::native_batch_norm_backward"}},
        {Trust::kForward,
         {"aten::log_sigmoid_backward", "aten::native_layer_norm_backward", "aten::_softmax_backward_data",
          "aten::_log_softmax_backward_data", "aten::_masked_softmax_backward", "aten::_weight_norm_interface_backward",
          "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_prelu_kernel_backward"}},
    }};

// Enough pivots, zero points between two arguments, different diagonals.
const OperatorSet expectsValues{
    "expect values that no fill provides",
    {"aten::lu_unpack", "aten::fake_quantize_per_channel_affine", "aten::fake_quantize_per_channel_affine_cachemask",
     "aten::_spdiags", "aten::_padded_dense_to_jagged_forward"}};

bool isOnCuda(ArrayRef<IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return tensor.is_cuda(); });
}

bool canBeTriedOut(const OperatorHandle& op, ArrayRef<IValue> arguments, bool knows_integers) {
  return hasOwnCpuKernel(op) && !op.hasTag(at::Tag::inplace_view) &&
         (!op.hasTag(at::Tag::nondeterministic_seeded) || takesGenerator(op)) &&
         (!expectsValues(op) || knows_integers) && !hasEffects(op) && mayBeTriedOut(op, arguments) &&
         std::all_of(arguments.begin(), arguments.end(), canStandIn) && !mixesDevices(arguments);
}

bool hasPassed(std::size_t hash) {
  const Locked lock{LockRank::kRefusals};
  return passed().count(hash) != 0;
}

void rememberPassed(std::size_t hash) {
  constexpr std::size_t kMost = 16384;
  const Locked lock{LockRank::kRefusals};
  if (passed().size() == kMost) {
    passed().clear();
  }
  passed().insert(hash);
}

bool passes(const OperatorHandle& op, ArrayRef<IValue> arguments, Likeness likeness) {
  return std::any_of(kFills.begin(), kFills.end(), [&](Fill fill) {
    likeness.fill = fill;
    return !tryOut(op, arguments, likeness).refusal;
  });
}

bool passesWithOtherDtypes(const OperatorHandle& op, ArrayRef<IValue> arguments, const SizeScale& scale) {
  const auto passes_with = [&](Dtypes dtypes, std::optional<std::size_t> only) {
    return passes(op, arguments, {Fill::kIdentity, dtypes, scale, only});
  };
  std::size_t tensors = 0;
  forEachTensor(arguments, [&tensors](const Tensor&) { ++tensors; });
  bool found = passes_with(Dtypes::kCommon, std::nullopt) || passes_with(Dtypes::kFloat, std::nullopt);
  for (std::size_t i = 0; i < std::min(tensors, kMostChanged) && !found; ++i) {
    found = passes_with(Dtypes::kFloat, i);
  }
  return found;
}

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
  const bool is_about_call =
      is_same || (likeness.known == nullptr && passesWithOtherDtypes(op, arguments, likeness.scale));
  return is_about_call ? Outcome{std::move(first), {}} : Outcome{};
}

// ---- Corrections ----

// NOTE [Correcting Meta kernels]
//
// The dtypes, shapes and strides of Meta kernels sometimes differ from those of the real kernels: many are separate
// Python functions. A trial of a call (NOTE [Errors of real tensors]) provides real results, which take
// precedence:
//
//   * dtypes always: for example, those of an empty convolution are promoted;
//   * shapes and strides if the trial had the sizes of the call: `pixel_unshuffle()` returns an empty tensor unchanged,
//     `zeros_like()` keeps the strides of dimensions of length 1;
//   * the order of strides if the trial was smaller: `floor_divide()` keeps that of its argument.
//
// Trials run on the CPU. For calls on CUDA they correct only strides, and the rules for elementwise CUDA kernels and
// convolutions are applied last (device_kernels.cpp).

namespace {

using Order = c10::SmallVector<std::size_t, c10::kDimVectorStaticSize>;

// Returns the dimensions longer than 1, from the innermost to the outermost.
Order orderOfStrides(const Tensor& tensor) {
  Order order;
  for (const auto dim : c10::irange(toSize(tensor.dim()))) {
    if (tensor.sizes()[dim] > 1) {
      order.push_back(dim);
    }
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return tensor.strides()[a] < tensor.strides()[b]; });
  return order;
}

Tensor corrected(const Tensor& meta, const Tensor& real, bool has_sizes) {
  const c10::IntArrayRef sizes = has_sizes ? real.sizes() : meta.sizes();
  const c10::DimVector strides = has_sizes ? c10::DimVector(real.strides()) : stridesLike(real, meta);
  const bool is_right =
      meta.scalar_type() == real.scalar_type() && meta.sizes() == sizes && meta.strides() == c10::IntArrayRef(strides);
  return is_right ? meta : at::empty_strided(sizes, strides, meta.options().dtype(real.scalar_type()));
}

std::vector<Tensor> tensorsIn(const IValue& value) {
  std::vector<Tensor> tensors;
  forEachTensor(value, [&tensors](const Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

IValue corrected(const IValue& meta, const IValue& real, bool has_sizes) {
  if (meta.isTensor() && real.isTensor() && !real.toTensor().defined()) {
    return real;
  }
  const std::vector<Tensor> real_tensors = tensorsIn(real);
  if (real_tensors.size() != tensorsIn(meta).size()) {
    return meta;
  }
  auto next = real_tensors.begin();
  return mapTensors(meta, [&](const Tensor& tensor) { return corrected(tensor, *next++, has_sizes); });
}

bool isSame(const IValue& a, const IValue& b) {
  const std::vector<Tensor> tensors = tensorsIn(a);
  const std::vector<Tensor> others = tensorsIn(b);
  return std::equal(tensors.begin(), tensors.end(), others.begin(), others.end(),
                    [](const Tensor& tensor, const Tensor& other) { return tensor.is_same(other); });
}

// Returns true if a written tensor has changed in the same way as its stand-in.
bool hasChangedAlike(const IValue& meta, const IValue& real) {
  return meta.isTensor() == real.isTensor() &&
         (!meta.isTensor() ||
          meta.toTensor().strides() == c10::IntArrayRef(stridesLike(real.toTensor(), meta.toTensor())));
}

template <typename Condition>
void correctIf(const Condition& condition, const RealResults& real, const OperatorHandle& op, Stack& stack) {
  const auto& returns = op.schema().returns();
  if (real.values.size() < returns.size()) {
    return;
  }
  for (const auto i : c10::irange(returns.size())) {
    IValue& meta = torch::jit::peek(stack, i, returns.size());
    if (returns[i].alias_info() == nullptr && condition(meta, real.values[i])) {
      meta = corrected(meta, real.values[i], real.has_sizes);
    }
  }
}

}  // namespace

c10::DimVector stridesLike(const Tensor& real, const Tensor& meta) {
  c10::DimVector strides(meta.strides());
  if (real.dim() != meta.dim() || meta.numel() == 0 || !real.is_non_overlapping_and_dense() ||
      !meta.is_non_overlapping_and_dense()) {
    return strides;
  }
  const Order order = orderOfStrides(real);
  const Order of_meta = orderOfStrides(meta);
  if (std::is_permutation(order.begin(), order.end(), of_meta.begin(), of_meta.end())) {
    std::int64_t stride = 1;
    for (const std::size_t dim : order) {
      strides[dim] = stride;
      stride *= meta.sizes()[dim];
    }
  }
  return strides;
}

bool agrees(const RealResults& real, const OperatorHandle& op, Arguments results) {
  const std::size_t num_returns = op.schema().returns().size();
  if (real.values.size() != results.size()) {
    return true;  // the trial has no results
  }
  const auto returned = results.slice(0, num_returns);
  const auto written = results.slice(num_returns);
  Stack stack = returned.vec();
  correctByReal(real, op, stack);
  return std::equal(stack.begin(), stack.end(), returned.begin(), isSame) &&
         std::equal(written.begin(), written.end(), real.values.begin() + static_cast<std::ptrdiff_t>(num_returns),
                    hasChangedAlike);
}

// Skips results that are arguments or views.
void correctByReal(const RealResults& real, const OperatorHandle& op, Stack& stack) {
  correctIf([](const IValue& /*meta*/, const IValue& /*real*/) { return true; }, real, op, stack);
}

// Only for results that otherwise agree with the Meta kernel's.
void correctStridesByReal(const RealResults& real, const OperatorHandle& op, Stack& stack) {
  const auto differs_in_strides_only = [&real](const IValue& meta, const IValue& found) {
    if (!meta.isTensor() || !found.isTensor() || !meta.toTensor().defined() || !found.toTensor().defined()) {
      return false;
    }
    const Tensor& a = meta.toTensor();
    const Tensor& b = found.toTensor();
    return a.scalar_type() == b.scalar_type() && (real.has_sizes ? a.sizes() == b.sizes() : a.dim() == b.dim());
  };
  correctIf(differs_in_strides_only, real, op, stack);
}

}  // namespace torchext
