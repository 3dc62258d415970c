// Convolutions by PyTorch's own kernels: ConvolutionMM2d.cu and NaiveConvolutionTranspose2d.cu. What cuDNN allocates is
// decided by which of its algorithms is the fastest.

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/Context.h>

#include "blas_workspace.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

// A convolution over one or two dimensions, without groups and dilation, as these kernels compute it.
class PlainConvolution {
 public:
  // `at` is the place of the argument `stride`, two after `weight`.
  PlainConvolution(const KernelCall& call, std::size_t at)
      : weight{call.tensor(at - 2)},
        strides{call.argument(at).toIntVector()},
        paddings{call.argument(at + 1).toIntVector()},
        dilations{call.argument(at + 2).toIntVector()},
        is_transposed{call.argument(at + 3).toBool()},
        groups{call.argument(at + 5).toInt()} {}

  static constexpr std::size_t kStrideOfForward = 3;
  static constexpr std::size_t kStrideOfBackward = 4;

  // `is_depthwise()` in Convolution.cpp: each channel of the input by itself.
  bool isDepthwise(const Tensor& input) const {
    return !at::globalContext().userEnabledCuDNN() && !is_transposed && groups > 1 && input.dim() == 4 &&
           groups == input.size(1) && weight.size(0) % groups == 0;
  }

  bool isKnown(const Tensor& input) const {
    const auto is_one = [](std::int64_t value) { return value == 1; };
    return !at::globalContext().userEnabledCuDNN() && groups == 1 && input.numel() > 0 &&
           (input.dim() == 3 || input.dim() == 4) && std::all_of(dilations.begin(), dilations.end(), is_one);
  }

  // A kernel of one element that visits each position once needs no columns.
  bool needsColumns() const {
    const auto is = [](std::int64_t wanted) { return [wanted](std::int64_t value) { return value == wanted; }; };
    return kernelSize() != 1 || !std::all_of(strides.begin(), strides.end(), is(1)) ||
           !std::all_of(paddings.begin(), paddings.end(), is(0));
  }

  // The patches of one sample, side by side: there is one for each position of the side with fewer channels of
  // positions.
  std::int64_t columns(const Tensor& of_positions) const {
    const std::int64_t positions = of_positions.numel() / (of_positions.size(0) * of_positions.size(1));
    return weight.size(1) * kernelSize() * positions * static_cast<std::int64_t>(weight.element_size());
  }

  const Tensor weight;
  const std::vector<std::int64_t> strides;
  const std::vector<std::int64_t> paddings;
  const std::vector<std::int64_t> dilations;
  const bool is_transposed;
  const std::int64_t groups;

 private:
  std::int64_t kernelSize() const {
    return c10::multiply_integers(weight.sizes().slice(2));
  }
};

BlockNumber copyUnlessPlain(KernelCall& call, const Tensor& tensor) {
  return tensor.is_contiguous() ? -1 : call.copy(tensor);
}

// One product for each sample. All of them use the same workspace, one after the other.
void multiplySamples(KernelCall& call) {
  callBlas(call);
}

std::int64_t bytesOfOnes(const Tensor& output) {
  return output.numel() / (output.size(0) * output.size(1)) * static_cast<std::int64_t>(output.element_size());
}

void convolution(KernelCall& call) {
  const PlainConvolution geometry{call, PlainConvolution::kStrideOfForward};
  const Tensor& input = call.tensor(0);
  if (!geometry.isKnown(input)) {
    return;
  }
  const BlockNumber copy = copyUnlessPlain(call, input);
  const BlockNumber weight = copyUnlessPlain(call, geometry.weight);
  call.allocateResults();
  if (geometry.is_transposed) {
    const BlockNumber columns = call.allocate(geometry.columns(input));
    const BlockNumber ones = call.has(2) ? call.allocate(bytesOfOnes(call.result())) : -1;
    multiplySamples(call);
    call.free({ones, columns});
  } else {
    const BlockNumber columns = geometry.needsColumns() ? call.allocate(geometry.columns(call.result())) : -1;
    multiplySamples(call);
    call.free(columns);
  }
  call.free({weight, copy});
}

// The gradient of the bias is a sum over all samples and positions.
void sumForBias(KernelCall& call, const Tensor& gradient) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t dim = 2; dim < gradient.dim(); ++dim) {
    dims.push_back(dim);
  }
  const Tensor& result = call.result(2);
  const std::int64_t accumulator = std::max<std::int64_t>(4, static_cast<std::int64_t>(gradient.element_size()));
  reduceOnGpu(call, {gradient, result, c10::OptionalIntArrayRef{dims}, /*keepdim=*/false, accumulator});
}

void transposedBackward(KernelCall& call, const PlainConvolution& geometry) {
  const Tensor& input = call.tensor(1);
  const auto wanted = call.argument(10).toBoolList();
  const BlockNumber gradient = copyUnlessPlain(call, call.tensor(0));
  if (wanted[0]) {
    call.allocateResult(0);
    const BlockNumber columns = call.allocate(geometry.columns(input));
    multiplySamples(call);
    call.free(columns);
  }
  if (wanted[1] || wanted[2]) {
    call.allocateResults();
    const BlockNumber columns = call.allocate(geometry.columns(input));
    multiplySamples(call);
    call.free(columns);
  }
  call.free(gradient);
}

void convolutionBackward(KernelCall& call) {
  const PlainConvolution geometry{call, PlainConvolution::kStrideOfBackward};
  const Tensor& gradient = call.tensor(0);
  const Tensor& input = call.tensor(1);
  if (geometry.isDepthwise(input)) {
    call.allocateResults({1, 0});
    return;
  }
  if (!geometry.isKnown(input)) {
    return;
  }
  if (geometry.is_transposed) {
    transposedBackward(call, geometry);
    return;
  }
  const auto wanted = call.argument(10).toBoolList();
  const BlockNumber gradient_copy = copyUnlessPlain(call, gradient);
  BlockNumber columns = -1;
  if (wanted[0]) {
    const BlockNumber weight = copyUnlessPlain(call, geometry.weight);
    call.allocateResult(0);
    columns = call.allocate(geometry.columns(gradient));
    multiplySamples(call);
    call.free(weight);
  }
  if (wanted[2]) {
    call.allocateResult(2);
    sumForBias(call, gradient);
  }
  if (wanted[1]) {
    const BlockNumber input_copy = copyUnlessPlain(call, input);
    call.allocateResult(1);
    columns = columns < 0 ? call.allocate(geometry.columns(gradient)) : columns;
    multiplySamples(call);
    call.free(input_copy);
  }
  call.free({columns, gradient_copy});
}

constexpr std::array kConvolutionRules{
    NamedKernelRule{"aten::convolution", convolution},
    NamedKernelRule{"aten::convolution_backward", convolutionBackward},
};

}  // namespace

c10::ArrayRef<NamedKernelRule> convolutionKernelRules() {
  return kConvolutionRules;
}

}  // namespace torchext
