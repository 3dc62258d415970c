#include "own_kernels.h"

#include <utility>
#include <vector>

#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

Tensor tensorOr(const IValue& value, const Tensor& other) {
  const Tensor tensor = value.isTensor() ? value.toTensor() : Tensor{};
  return tensor.defined() ? tensor : other;
}

// Returns a tensor with one element per channel, in the dtype in which the kernels of `like` accumulate.
Tensor forEachChannel(int64_t channels, const Tensor& like) {
  return at::empty({channels}, like.options().dtype(at::toAccumulateType(like.scalar_type(), c10::DeviceType::CUDA)));
}

// (input, eps) -> (mean, invstd)
Stack stats(ArrayRef<IValue> arguments) {
  const Tensor& input = arguments[0].toTensor();
  return {forEachChannel(input.size(1), input), forEachChannel(input.size(1), input)};
}

// (input, mean, invstd, ...) -> (mean, invstd). The argument `mean` has one row per process.
Stack gatherStats(ArrayRef<IValue> arguments) {
  const Tensor& mean = arguments[1].toTensor();
  return {forEachChannel(mean.size(1), mean), forEachChannel(mean.size(1), mean)};
}

// (input, ...) -> output
Stack likeFirst(ArrayRef<IValue> arguments) {
  return {at::empty_like(arguments[0].toTensor())};
}

// (grad_out, input, ...) -> grad_input
Stack likeSecond(ArrayRef<IValue> arguments) {
  return {at::empty_like(arguments[1].toTensor())};
}

// (grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g) -> (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
Stack reduceBackward(ArrayRef<IValue> arguments) {
  const Tensor& mean = arguments[2].toTensor();
  const auto like = [](bool is_wanted, const Tensor& tensor) -> IValue {
    return is_wanted ? at::empty_like(tensor, c10::MemoryFormat::Contiguous) : Tensor{};
  };
  const Tensor weight = tensorOr(arguments[4], mean);
  const bool of_input = arguments[5].toBool();
  return {like(of_input, mean), like(of_input, mean), like(arguments[6].toBool(), weight),
          like(arguments[7].toBool(), weight)};
}

// (input_gates, hidden_gates, hx, ...) -> (hy, workspace). The workspace has five values per hidden unit (RNN.cu).
Stack gruCell(ArrayRef<IValue> arguments) {
  const Tensor& hx = arguments[2].toTensor();
  return {at::empty_like(hx, c10::MemoryFormat::Contiguous), at::empty({hx.size(0), hx.size(1) * 5}, hx.options())};
}

// (input_gates, hidden_gates, cx, ...) -> (hy, cy, workspace). PyTorch's Meta kernel fails without biases.
Stack lstmCell(ArrayRef<IValue> arguments) {
  const Tensor& cx = arguments[2].toTensor();
  return {at::empty_like(cx, c10::MemoryFormat::Contiguous), at::empty_like(cx, c10::MemoryFormat::Contiguous),
          at::empty_like(arguments[0].toTensor(), c10::MemoryFormat::Contiguous)};
}

// (grad_hy, workspace, has_bias) -> (grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias)
Stack gruCellBackward(ArrayRef<IValue> arguments) {
  const Tensor& grad = arguments[0].toTensor();
  const auto batch = grad.size(0);
  const auto gates = grad.size(1) * 3;
  const auto bias = [&]() -> IValue { return arguments[2].toBool() ? at::empty({gates}, grad.options()) : Tensor{}; };
  return {at::empty({batch, gates}, grad.options()), at::empty({batch, gates}, grad.options()),
          at::empty_like(grad, c10::MemoryFormat::Contiguous), bias(), bias()};
}

// (input, grid) -> output
Stack sampleGrid(ArrayRef<IValue> arguments) {
  const Tensor& input = arguments[0].toTensor();
  const Tensor& grid = arguments[1].toTensor();
  constexpr int64_t kMostChannels = 1024;
  TORCH_CHECK(input.dim() == 4 && grid.dim() == 4 && input.size(0) == grid.size(0) && grid.size(3) == 2 &&
                  input.size(1) <= kMostChannels,
              "Invalid arguments to cudnn_grid_sampler");  // as `cudnn_grid_sampler_forward()`
  return {at::empty({input.size(0), input.size(1), grid.size(1), grid.size(2)}, input.options())};
}

// (input, grid, grad_output) -> (grad_input, grad_grid)
Stack sampleGridBackward(ArrayRef<IValue> arguments) {
  const auto gradientOf = [](const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
  return {gradientOf(arguments[0].toTensor()), gradientOf(arguments[1].toTensor())};
}

void checkAttention(ArrayRef<IValue> tensors) {
  const auto dtype = tensors.front().toTensor().scalar_type();
  for (const IValue& value : tensors) {
    TORCH_CHECK(value.toTensor().dim() == 4 && value.toTensor().scalar_type() == dtype,
                "_efficient_attention_backward() expects four tensors of four dimensions and one dtype.");
  }
}

// The gradients of query, key and value on one storage (`shared_storage_dqdkdv`).
Stack sharedGradients(const Tensor& query, const Tensor& key) {
  TORCH_CHECK(query.size(1) == key.size(1), "seqlen must match for `shared_storage_dqdkdv");
  TORCH_CHECK(query.size(3) == key.size(3), "embedding dim must match for `shared_storage_dqdkdv");
  std::vector<int64_t> sizes = query.sizes().vec();
  sizes.insert(sizes.end() - 2, 3);
  const Tensor shared = at::empty(sizes, query.options());
  return {shared.select(-3, 0), shared.select(-3, 1), shared.select(-3, 2)};
}

// Its rows are aligned.
Tensor gradientOfBias(const Tensor& bias) {
  constexpr int64_t kAlignment = 16;  // elements
  std::vector<int64_t> sizes = bias.sizes().vec();
  const int64_t last = std::exchange(sizes.back(), (sizes.back() + kAlignment - 1) / kAlignment * kAlignment);
  return at::empty(sizes, bias.options()).slice(-1, 0, last);
}

// (grad_out, query, key, value, bias, ...) -> (grad_query, grad_key, grad_value, grad_bias). PyTorch's Meta kernel
// lacks the argument `out`.
Stack efficientAttentionBackward(ArrayRef<IValue> arguments) {
  constexpr std::size_t kQuery = 1;
  constexpr std::size_t kBias = 4;
  constexpr std::size_t kBiasRequiresGrad = 15;
  checkAttention(arguments.slice(0, kBias));
  const bool is_shared = arguments.back().toBool();
  Stack gradients =
      is_shared ? sharedGradients(arguments[kQuery].toTensor(), arguments[kQuery + 1].toTensor()) : Stack{};
  for (std::size_t i = kQuery; i < kBias && !is_shared; ++i) {
    gradients.emplace_back(at::empty(arguments[i].toTensor().sizes(), arguments[i].toTensor().options()));
  }
  const Tensor bias = tensorOr(arguments[kBias], Tensor{});
  gradients.emplace_back(bias.defined() && arguments[kBiasRequiresGrad].toBool() ? gradientOfBias(bias) : Tensor{});
  return gradients;
}

// (dense, offsets, total_L) -> values. The CPU kernel compares the length with the last offset.
Stack paddedToJagged(ArrayRef<IValue> arguments) {
  const Tensor& dense = arguments[0].toTensor();
  const auto jagged = toSigned(arguments[1].toTensorList().size());
  TORCH_CHECK(dense.dim() > jagged, "_padded_dense_to_jagged_forward(): expected padded dim >= ", jagged + 1, ", got ",
              dense.dim());
  std::vector<int64_t> sizes{arguments[2].toInt()};
  const auto inner = dense.sizes().slice(toSize(jagged + 1));
  sizes.insert(sizes.end(), inner.begin(), inner.end());
  return {at::empty(sizes, dense.options())};
}

// For operators that only check values. If these are known, the real kernel runs: NOTE [Known values].
Stack nothing(ArrayRef<IValue> /*arguments*/) {
  return {};
}

// Fake CUDA devices use PyTorch's own kernels, not those of cuDNN or MIOpen.
Stack no(ArrayRef<IValue> /*arguments*/) {
  return {false};
}

using OwnKernel = Stack (*)(ArrayRef<IValue> arguments);

const OperatorTable<OwnKernel> ownKernelOf{"have no kernel for the CPU or the meta device that returns their metadata",
                                           {{stats, {"aten::batch_norm_stats"}},
                                            {gatherStats, {"aten::batch_norm_gather_stats_with_counts"}},
                                            {likeFirst, {"aten::batch_norm_elemt"}},
                                            {reduceBackward, {"aten::batch_norm_backward_reduce"}},
                                            {likeSecond, {"aten::batch_norm_backward_elemt"}},
                                            {lstmCell, {"aten::_thnn_fused_lstm_cell"}},
                                            {gruCell, {"aten::_thnn_fused_gru_cell"}},
                                            {gruCellBackward, {"aten::_thnn_fused_gru_cell_backward"}},
                                            {sampleGrid, {"aten::cudnn_grid_sampler"}},
                                            {sampleGridBackward, {"aten::cudnn_grid_sampler_backward"}},
                                            {efficientAttentionBackward, {"aten::_efficient_attention_backward"}},
                                            {paddedToJagged, {"aten::_padded_dense_to_jagged_forward"}},
                                            {nothing, {"aten::_validate_compressed_sparse_indices"}},
                                            {no,
                                             {"aten::_use_cudnn_ctc_loss", "aten::_use_cudnn_ctc_loss.Tensor",
                                              "aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor"}}},
                                           Overloads::kNamed};

}  // namespace

bool hasOwnKernel(const OperatorHandle& op) {
  return ownKernelOf(op) != nullptr;
}

void callOwnKernel(const OperatorHandle& op, torch::jit::Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  Stack results = ownKernelOf(op)(topOf(stack, count));
  torch::jit::drop(stack, count);
  for (IValue& result : results) {
    torch::jit::push(stack, std::move(result));
  }
}

}  // namespace torchext
