// NOTE [Attention on fake CUDA]
//
// `scaled_dot_product_attention()` is composed of other operators, depending on the device. `_fused_sdp_choice_stub`
// chooses a backend (flash, memory-efficient, cuDNN or math), and attention prepares the arguments for it and calls it.
// The backends differ in what they allocate and save: only math keeps the matrix of scores. In a build without CUDA,
// nothing is registered for CUDA, so math would always be chosen. A build with CUDA would query the driver.
//
// While fake CUDA devices are visible, our own function is registered there. It chooses as PyTorch does
// (`select_sdp_backend()`, sdp_utils.cpp) for the described device: by the order and the switches that the user has
// set, and by the limits of each backend. Checks that do not depend on the device are PyTorch's own functions, which
// are in a header. So each release applies its own rules. All official builds have flash and memory-efficient
// attention, and the cuDNN version named below. Sizes are symbolic while a compiler traces for several sizes.

#include "fake_cuda.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>

#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/util/env.h>

#include "../../core/torch_internals/torch_compat.h"
#include "../../libraries/support/sizes.h"

namespace torchext {

using at::SDPBackend;
using at::Tensor;
using sdp::sdp_params;

namespace {

// The version of cuDNN in the official builds for CUDA 13, in the format of `versionRuntimeCuDNN()`, and whether its
// attention supports heads of 256.
constexpr bool kHasHeadsOf256 = compat::applies("cudnn_9_26");
constexpr int kCudnn = kHasHeadsOf256 ? 92600 : 91900;

constexpr bool kIgnoresStrideOfOne = true;

static_assert(compat::applies("attention_heads") == (TORCHEXT_TORCH >= 215));
#if TORCHEXT_TORCH >= 215
constexpr bool kEfficientTakesGroups = true;

template <bool takes_groups, bool needs_same_number = true>
bool haveHeads(const sdp_params& params, bool warns) {
  return sdp::check_batch_size_and_num_heads_dense<takes_groups, needs_same_number, true>(params, warns);
}
sdp_params withBatch(sdp_params params) {
  return sdp::normalize_unbatched_input(std::move(params));
}
#else
constexpr bool kEfficientTakesGroups = false;

template <bool takes_groups, bool needs_same_number = true>
bool haveHeads(const sdp_params& params, bool warns) {
  return sdp::check_batch_size_and_num_heads_dense<takes_groups, needs_same_number>(params, warns);
}
sdp_params withBatch(sdp_params params) {
  return params;
}
#endif

bool isHalf(const sdp_params& params) {
  return params.query.scalar_type() == at::kHalf || params.query.scalar_type() == at::kBFloat16;
}

// `check_sm_version()`: compute capabilities from the first to the last, inclusive.
bool isWithin(const GpuDescription& gpu, int first_major, int first_minor, int last_major, int last_minor) {
  return gpu.isAtLeast(first_major, first_minor) && !gpu.isAtLeast(last_major, last_minor + 1);
}

template <typename... Arguments>
bool fails(bool warns, const Arguments&... reason) {
  if (warns) {
    TORCH_WARN(reason...);
  }
  return false;
}

bool hasLowPrecision(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  static constexpr std::array kSince80{at::kHalf, at::kBFloat16};
  static constexpr std::array kBefore{at::kHalf};
  return gpu.major >= 8 ? sdp::check_tensor_dtype(params, kSince80, warns)
                        : sdp::check_tensor_dtype(params, kBefore, warns);
}

// The alignment of a head's size that the cutlass kernels require (`minimum_gemm_alignment()`), in elements.
std::int64_t alignmentOf(const sdp_params& params, const GpuDescription& gpu) {
  const bool uses_tensor_cores = gpu.major >= 8 || (gpu.major >= 7 && isHalf(params));
  const std::int64_t minimum = gpu.major >= 8 ? 4 : 1;
  return uses_tensor_cores ? std::max<std::int64_t>(minimum, isHalf(params) ? 8 : 4) : minimum;
}

bool hasHeadForFlash(const sdp_params& params, bool warns) {
  const c10::SymInt head = params.query.sym_size(-1);
  if (head == params.key.sym_size(-1) && head == params.value.sym_size(-1) && head <= 256) {
    return true;
  }
  return fails(warns,
               "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to "
               "256. Got Query.size(-1): ",
               head, ", Key.size(-1): ", params.key.sym_size(-1), ", Value.size(-1): ", params.value.sym_size(-1),
               " instead.");
}

bool isGpuForFlash(const GpuDescription& gpu, bool warns) {
  return isWithin(gpu, 8, 0, 12, 1) ||
         fails(warns,
               "Flash attention only supports gpu architectures in the range [sm80, sm121]. Attempting to run on "
               "a sm ",
               gpu.major, ".", gpu.minor, " gpu.");
}

// The backward pass needs more shared memory than these devices have.
bool hasHeadForBackwardOfFlash(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  const bool is_small = isWithin(gpu, 8, 6, 8, 9) || isWithin(gpu, 12, 0, 12, 1);
  const c10::SymInt head = params.query.sym_size(-1);
  if (!sdp::input_requires_grad(params) || !is_small || head <= 192 || (params.dropout <= 0 && head > 224)) {
    return true;
  }
  return fails(warns,
               "Flash attention currently doesn't support training with head_dim in (192, 224] or (head_dim in "
               "(224, 256] and dropout > 0.0) on this architecture. Attempting to run with dropout set to: ",
               params.dropout, " and head_dim: ", head, " on a sm ", gpu.major, ".", gpu.minor, " gpu.");
}

bool isSquareIfCausal(const sdp_params& params, bool warns) {
  const c10::SymInt queries = params.query.sym_size(-2);
  const c10::SymInt keys = params.key.sym_size(-2);
  return !params.is_causal || queries == keys ||
         fails(warns,
               "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: ", queries,
               " seqlen_k: ", keys,
               ". If you would like to use causal attention with non-square masks, please see CausalAttnMask.");
}

bool canUseFlash(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  return sdp::check_runtime_disabled_flash(params, warns) && sdp::check_tensor_shapes(params, warns) &&
         sdp::check_for_attn_mask(params, warns) && hasHeadForFlash(params, warns) && isGpuForFlash(gpu, warns) &&
         hasHeadForBackwardOfFlash(params, gpu, warns) && isSquareIfCausal(params, warns) &&
         hasLowPrecision(params, gpu, warns) && haveHeads<true>(params, warns) &&
         sdp::check_nonzero_sequence_lengths_dense(params, warns) &&
         sdp::check_last_dim_stride_equals_1_dense<kIgnoresStrideOfOne>(params, warns);
}

bool hasHeadForEfficient(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  const std::int64_t alignment = alignmentOf(params, gpu);
  const c10::SymInt query = params.query.sym_size(-1);
  const c10::SymInt value = params.value.sym_size(-1);
  return (query == params.key.sym_size(-1) && query > 0 && value > 0 && query % alignment == 0 &&
          value % alignment == 0) ||
         fails(warns, "Mem efficient attention requires last dimension of inputs to be divisible by ", alignment,
               ". Got Query.size(-1): ", query, ", Key.size(-1): ", params.key.sym_size(-1),
               ", Value.size(-1): ", value, " instead.");
}

// The caching allocator aligns blocks, so the offset determines the alignment of a tensor.
bool isAlignedForEfficient(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  if constexpr (!compat::applies("attention_alignment")) {
    return true;
  }
  const auto alignment = alignmentOf(params, gpu) * toSigned(params.query.element_size());
  const auto is_aligned = [alignment](const Tensor& tensor) {
    return TORCH_GUARD_OR_FALSE(tensor.sym_numel().sym_eq(0)) ||
           tensor.sym_storage_offset() * toSigned(tensor.element_size()) % alignment == 0;
  };
  return gpu.major < 8 || (is_aligned(params.query) && is_aligned(params.key) && is_aligned(params.value)) ||
         fails(warns,
               "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size to "
               "be aligned to ",
               alignment, " bytes.");
}

bool hasPrecisionForEfficient(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  static constexpr std::array kSince80{at::kHalf, at::kFloat, at::kBFloat16};
  static constexpr std::array kBefore{at::kHalf, at::kFloat};
  return gpu.major >= 8 ? sdp::check_tensor_dtype(params, kSince80, warns)
                        : sdp::check_tensor_dtype(params, kBefore, warns);
}

bool canUseEfficient(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  return sdp::check_runtime_disabled_mem_efficient(params, warns) && isWithin(gpu, 5, 0, 12, 1) &&
         sdp::check_tensor_shapes(params, warns) && hasHeadForEfficient(params, gpu, warns) &&
         isAlignedForEfficient(params, gpu, warns) && sdp::check_nonzero_sequence_lengths_dense(params, warns) &&
         sdp::check_last_dim_stride_equals_1_dense<!kIgnoresStrideOfOne>(params, warns) &&
         haveHeads<kEfficientTakesGroups>(params, warns) && hasPrecisionForEfficient(params, gpu, warns);
}

// Hopper and Blackwell for data centers.
bool isForLargeHeads(const GpuDescription& gpu) {
  const bool is_unsupported = gpu.major == 10 && gpu.minor == 7 && kCudnn <= 92500;
  return ((gpu.major == 9 && gpu.minor == 0) || gpu.major == 10) && !is_unsupported;
}

// `check_cudnn_tensor_shapes()` and `check_cudnn_d256_bprop_head_dim()`
bool hasShapesForCudnn(const sdp_params& params, const GpuDescription& gpu) {
  constexpr std::int64_t kLargest = 65535;
  const c10::SymInt query = params.query.sym_size(-1);
  const c10::SymInt value = params.value.sym_size(-1);
  const bool takes_256 = kHasHeadsOf256 && isForLargeHeads(gpu);
  const bool is_192_and_128 = query == 192 && value == 128;
  const std::int64_t limit = takes_256 ? 256 : isForLargeHeads(gpu) && is_192_and_128 ? 192 : 128;
  const bool has_heads = query <= limit && value <= limit && query % 8 == 0 && value % 8 == 0;
  const bool has_lengths = params.key.sym_size(2) != 1 && (params.dropout == 0 || params.query.sym_size(2) != 1);
  const bool has_backward = !takes_256 || !sdp::input_requires_grad(params) || (query <= 128 && value <= 128) ||
                            is_192_and_128 || (query == 256 && value == 256);
  return params.query.sym_size(0) <= kLargest && params.query.sym_size(1) <= kLargest && has_heads && has_lengths &&
         has_backward;
}

bool canUseCudnn(const sdp_params& params, const GpuDescription& gpu, bool warns) {
  const at::Context& context = at::globalContext();
  if (!context.userEnabledCuDNNSDP()) {
    return fails(warns, "cuDNN attention has been runtime disabled.");
  }
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) {
    return fails(warns, "cuDNN SDPA is not deterministic.");
  }
  // cuDNN represents dropout probabilities as multiples of 1/16.
  const bool has_dropout = params.dropout * 16 == std::floor(params.dropout * 16);
  return sdp::check_tensor_shapes(params, warns) && hasLowPrecision(params, gpu, warns) &&
         sdp::check_attn_mask_shape(params, warns) && isWithin(gpu, 8, 0, 12, 1) && has_dropout &&
         sdp::check_nonzero_sequence_lengths_dense(params, warns) &&
         sdp::check_last_dim_stride_equals_1_dense<kIgnoresStrideOfOne>(params, warns) &&
         haveHeads<true, false>(params, false) && hasShapesForCudnn(params, gpu);
}

// PyTorch puts cuDNN first when attention is called for the first time. Here this applies only to devices that prefer
// it (`check_prefer_cudnn_attention()`, with a cuDNN after 9.15), and only until the user sets an order.
std::array<SDPBackend, at::num_sdp_backends> orderFor(const GpuDescription& gpu) {
  static_assert(kCudnn > 91500);
  static const bool is_wanted = c10::utils::check_env("TORCH_CUDNN_SDPA_DEPRIORITIZED") != true;
  auto order = at::globalContext().sDPPriorityOrder();
  constexpr std::array kDefault{SDPBackend::flash_attention, SDPBackend::efficient_attention, SDPBackend::math,
                                SDPBackend::cudnn_attention};
  if (is_wanted && (gpu.major == 9 || gpu.major == 10) && std::equal(kDefault.begin(), kDefault.end(), order.begin())) {
    auto* const cudnn = std::find(order.begin(), order.end(), SDPBackend::cudnn_attention);
    std::rotate(order.begin(), cudnn, std::next(cudnn));
  }
  return order;
}

bool canUse(SDPBackend backend, const sdp_params& params, const GpuDescription& gpu) {
  switch (backend) {
    case SDPBackend::cudnn_attention:
      return canUseCudnn(params, gpu, /*warns=*/false);
    case SDPBackend::flash_attention:
      return canUseFlash(params, gpu, /*warns=*/false);
    case SDPBackend::efficient_attention:
      return canUseEfficient(params, gpu, /*warns=*/false);
    case SDPBackend::math:
      return at::globalContext().userEnabledMathSDP();
    default:
      // The backend of devices outside of PyTorch. It is allowed unless `sdpa_kernel()` names others.
      TORCH_CHECK(!at::globalContext().userEnabledOverrideableSDP(), "Invalid backend");
      return false;
  }
}

[[noreturn]] void refuse(const sdp_params& params, const GpuDescription& gpu) {
  TORCH_WARN("Memory efficient kernel not used because:");
  canUseEfficient(params, gpu, /*warns=*/true);
  TORCH_WARN("Flash attention kernel not used because:");
  canUseFlash(params, gpu, /*warns=*/true);
  TORCH_WARN("cuDNN attention kernel not used because:");
  canUseCudnn(params, gpu, /*warns=*/true);
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

std::int64_t chooseAttention(const Tensor& query,
                             const Tensor& key,
                             const Tensor& value,
                             const std::optional<Tensor>& mask,
                             double dropout,
                             bool is_causal,
                             std::optional<double> /*scale*/,
                             bool enable_gqa) {
  const GpuDescription& gpu = fakeGpu();
  if (query.is_nested() || key.is_nested() || value.is_nested()) {
    return static_cast<std::int64_t>(SDPBackend::math);  // nested fakes do not exist
  }
  const sdp_params params = withBatch({query, key, value, mask, dropout, is_causal, enable_gqa});
  for (const SDPBackend backend : orderFor(gpu)) {
    if (canUse(backend, params, gpu)) {
      return static_cast<std::int64_t>(backend);
    }
  }
  refuse(params, gpu);
}

}  // namespace

void chooseAttentionOnFakeCuda() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&chooseAttention);
}

}  // namespace torchext
