#include "device_hints.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/WrapDimMinimal.h>

#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "convolutions.h"
#include "promoted_strides.h"

namespace torchext {

namespace {

// These return the mean and the inverse standard deviation after the normalized tensor.
const OperatorSet isBatchNormalization{
    "return the mean and the inverse standard deviation of channels, and keep the memory format on the CPU",
    {"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
     "aten::_batch_norm_with_update", "aten::_batch_norm_no_update"}};
// Their second argument is the input. The gradient has its memory format (`batch_norm_backward_cpu`,
// Normalization.cpp).
const OperatorSet isBatchNormalizationBackward{
    "return a gradient in the memory format of their second argument (`batch_norm_backward_cpu`)",
    {"aten::native_batch_norm_backward", "aten::batch_norm_backward"}};
const OperatorSet isOtherNormalization{"return the mean and the inverse standard deviation of layers or groups",
                                       {"aten::native_layer_norm", "aten::native_group_norm"}};

// These keep the memory format of their argument on the CPU (`max_unpooling2d_forward_out_cpu`, `channel_shuffle()`),
// but their Meta kernels do not.
const OperatorSet keepsFormat{"keep the memory format of their argument on the CPU, unlike their Meta kernels",
                              {"aten::max_unpool2d", "aten::channel_shuffle"}};

// Like `where_self_out()`.
const OperatorSet convertsByItself{"copy arguments to the common dtype before their kernel, on every device",
                                   {"aten::where"}};

// Found by test/cuda_host/test_layouts.py, in addition to batch normalizations and the operators that keep the format
// on the CPU.
const OperatorSet hasOwnLayoutOnCuda{
    "lay out results differently on CUDA and on the CPU",
    {"aten::replication_pad2d", "aten::replication_pad2d_backward", "aten::replication_pad3d",
     "aten::replication_pad3d_backward", "aten::reflection_pad2d", "aten::reflection_pad2d_backward",
     "aten::reflection_pad3d", "aten::reflection_pad3d_backward", "aten::pixel_shuffle", "aten::log_sigmoid_forward",
     "aten::nonzero_static", "aten::_linalg_svd", "aten::linalg_eig", "aten::_fft_r2c"}};

bool isTrue(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const char* name) {
  const int position = findArgument(op.schema(), name);
  return position >= 0 && arguments[toSize(position)].toBool();
}

// Returns true if the CPU kernel saves no statistics, as in evaluation (`batch_norm_cpu`, Normalization.cpp).
bool savesNothing(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.schema().name();
  if (name == "aten::_native_batch_norm_legit_no_training" || name == "aten::_batch_norm_no_update") {
    return true;
  }
  return findArgument(op.schema(), "training") >= 0 && !isTrue(op, arguments, "training");
}

// Returns the dtype of statistics on the CPU: that of the input, or float32 if the input has a reduced dtype and a
// parameter is float32 (`is_mixed_type()` and `param_scalar_type()`, mixed_data_type.h).
c10::ScalarType statisticsDtype(c10::ArrayRef<c10::IValue> arguments) {
  const c10::ScalarType input = arguments.front().toTensor().scalar_type();
  if (!c10::isReducedFloatingType(input)) {
    return input;
  }
  bool is_mixed = false;
  forEachTensor(arguments.slice(1), [&is_mixed](const Tensor& parameter) {
    is_mixed = is_mixed || parameter.scalar_type() == c10::kFloat;
  });
  return is_mixed ? c10::kFloat : input;
}

void correctStatistics(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, Stack& results) {
  constexpr std::size_t kMean = 1;
  constexpr std::size_t kInverseDeviation = 2;
  const auto dtype = statisticsDtype(arguments);
  for (const std::size_t position : {kMean, kInverseDeviation}) {
    c10::IValue& result = torch::jit::peek(results, position, op.schema().returns().size());
    const Tensor& statistic = result.toTensor();
    const c10::DimVector sizes = savesNothing(op, arguments) ? c10::DimVector{0} : c10::DimVector(statistic.sizes());
    result = at::empty(sizes, statistic.options().dtype(dtype));
  }
}

// Gives the result the memory format of the first argument. Makes it contiguous if the argument has neither format.
void correctMemoryFormat(c10::ArrayRef<c10::IValue> arguments, c10::IValue& result) {
  const Tensor& meta = result.toTensor();
  const auto format = arguments.front().toTensor().suggest_memory_format();
  result = at::empty(meta.sizes(), meta.options().memory_format(format));
}

// With MKL, the batch dimensions of the result follow the order of the input's strides (`_exec_fft()`,
// SpectralOps.cpp). For equal strides (the gradient of a sum), the order depends on std::partition(), which the Meta
// kernel does not imitate.
void correctBatchOrder(c10::ArrayRef<c10::IValue> arguments, Stack& results) {
  const Tensor& input = arguments.front().toTensor();
  const Tensor& result = results.back().toTensor();
  std::vector<bool> is_transformed(toSize(input.dim()));
  int64_t stride = 1;
  for (const int64_t dim : arguments[1].toIntVector()) {
    is_transformed[toSize(c10::maybe_wrap_dim(dim, input.dim()))] = true;
  }
  std::vector<std::size_t> order(is_transformed.size());
  std::iota(order.begin(), order.end(), 0);
  const auto batch_end =
      std::partition(order.begin(), order.end(), [&](std::size_t dim) { return !is_transformed[dim]; });
  std::for_each(batch_end, order.end(), [&](std::size_t dim) { stride *= result.sizes()[dim]; });
  std::sort(order.begin(), batch_end,
            [&](std::size_t a, std::size_t b) { return input.strides()[a] > input.strides()[b]; });
  c10::DimVector strides(result.strides());
  for (auto dim = batch_end; dim != order.begin();) {
    --dim;
    strides[*dim] = stride;
    stride *= result.sizes()[*dim];
  }
  results.back() = at::empty_strided(result.sizes(), strides, result.options());
}

bool hasEqualStrides(const Tensor& tensor) {
  c10::DimVector strides(tensor.strides());
  std::sort(strides.begin(), strides.end());
  return std::adjacent_find(strides.begin(), strides.end()) != strides.end();
}

bool isFourier(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return at::hasMKL() && (name == "aten::_fft_r2c" || name == "aten::_fft_c2c");
}

bool isNormalization(const OperatorHandle& op) {
  return isBatchNormalization(op) || isOtherNormalization(op);
}

// Returns true if the results of the Meta kernel must be corrected.
bool decidesByDevice(const OperatorHandle& op, c10::Device device) {
  const auto& returns = op.schema().returns();
  if (std::any_of(returns.begin(), returns.end(), [](const auto& result) { return result.alias_info() != nullptr; })) {
    return false;  // an `out` already has its strides
  }
  if (hasFormatOfConvolution(op)) {
    return device.is_cpu() || device.is_cuda();
  }
  if (device.is_cuda()) {
    return op.hasTag(at::Tag::pointwise) && !convertsByItself(op);
  }
  return device.is_cpu() &&
         (isNormalization(op) || isBatchNormalizationBackward(op) || isFourier(op) || keepsFormat(op));
}

}  // namespace

bool hasLayoutOfCpu(const OperatorHandle& op) {
  return !hasOwnLayoutOnCuda(op) && !keepsFormat(op) && !isBatchNormalization(op) && !isBatchNormalizationBackward(op);
}

void correctForDevice(const OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      Stack& results) {
  if (!decidesByDevice(op, device)) {
    return;
  }
  if (hasFormatOfConvolution(op)) {
    giveMemoryFormat(op, arguments, device, results);
  } else if (device.is_cuda()) {
    giveStridesOfCuda(arguments, results);
  } else if (isNormalization(op)) {
    correctStatistics(op, arguments, results);
    if (isBatchNormalization(op)) {
      correctMemoryFormat(arguments, torch::jit::peek(results, 0, op.schema().returns().size()));
    }
  } else if (isBatchNormalizationBackward(op)) {
    c10::IValue& gradient = torch::jit::peek(results, 0, op.schema().returns().size());
    if (gradient.toTensor().defined()) {
      correctMemoryFormat(arguments.slice(1), gradient);
    }
  } else if (!isFourier(op)) {
    correctMemoryFormat(arguments, results.back());
  } else if (hasEqualStrides(arguments.front().toTensor())) {
    correctBatchOrder(arguments, results);
  }
}

}  // namespace torchext
