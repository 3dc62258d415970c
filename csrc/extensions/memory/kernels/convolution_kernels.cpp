// Convolutions by PyTorch's native kernels: `_convolution()` and `convolution_backward()` in Convolution.cpp, and the
// functions that they call. The memory of cuDNN is not modeled: it depends on which of its algorithms is the fastest.

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#include "../../../core/support/sizes.h"
#include "blas_workspace.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

enum class Backend : std::uint8_t {
  kLibrary,       // cuDNN, or no kernel
  kDepthwise2d,   // DepthwiseConv2d.cu
  kDepthwise3d,   // DepthwiseConv3d.cu
  kSlow2d,        // ConvolutionMM2d.cu
  kDilated,       // NaiveDilatedConvolution.cu, for all in three dimensions
  kTransposed2d,  // NaiveConvolutionTranspose2d.cu
  kTransposed3d,  // NaiveConvolutionTranspose3d.cu
};

constexpr std::int64_t kDimsOf1d = 3;  // of the tensors of a convolution
constexpr std::int64_t kDimsOf2d = 4;

std::int64_t countPositions(const Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(2));
}

// Returns a one-dimensional tensor as `view4d()` shows it: PyTorch has no kernels for one dimension. Only the geometry
// is valid.
Tensor inTwoDimensions(const Tensor& tensor) {
  c10::DimVector sizes{tensor.sizes()};
  c10::DimVector strides{tensor.strides()};
  if (tensor.dim() == kDimsOf1d) {
    sizes.insert(sizes.begin() + 2, 1);
    strides.insert(strides.begin() + 2, tensor.size(2) * tensor.stride(2));
  }
  return at::detail::empty_strided_meta(sizes, strides, tensor.scalar_type());
}

// The arguments of a convolution besides its tensors. `at` is the index of the argument `stride`, two after `weight`.
class Geometry {
 public:
  Geometry(const KernelCall& call, std::size_t at)
      : is_transposed_{call.argument(at + 3).toBool()},
        groups_{call.argument(at + 5).toInt()},
        kernel_sizes_{call.tensor(at - 2).sizes().slice(2).vec()},
        strides_{call.argument(at).toIntVector()},
        paddings_{call.argument(at + 1).toIntVector()},
        dilations_{call.argument(at + 2).toIntVector()},
        backend_{decideBackend(inTwoDimensions(call.tensor(at - 3)), inTwoDimensions(call.tensor(at - 2)))} {}

  static constexpr std::size_t kStrideOfForward = 3;
  static constexpr std::size_t kStrideOfBackward = 4;

  Backend backend() const {
    return backend_;
  }
  std::int64_t groups() const {
    return groups_;
  }
  bool isDepthwise() const {
    return backend_ == Backend::kDepthwise2d || backend_ == Backend::kDepthwise3d;
  }

  // A kernel of one element that visits each position once does not need columns.
  bool needsColumns() const {
    return !areAll(kernel_sizes_, 1) || !areAll(strides_, 1) || !areAll(paddings_, 0);
  }

  // The size of the patches of one sample: one for each position of the side with fewer positions.
  std::int64_t columns(const Tensor& of_positions, const Tensor& weight) const {
    return weight.size(1) * c10::multiply_integers(kernel_sizes_) * countPositions(of_positions) *
           toSigned(weight.element_size());
  }

 private:
  static bool areAll(const std::vector<std::int64_t>& values, std::int64_t wanted) {
    return std::all_of(values.begin(), values.end(), [wanted](std::int64_t value) { return value == wanted; });
  }

  // `ConvParams::is_depthwise()`: each channel of the input separately.
  bool isDepthwise(const Tensor& input, const Tensor& weight) const {
    return !is_transposed_ && groups_ > 1 && groups_ == input.size(1) && weight.size(0) % groups_ == 0;
  }

  // `ConvParams::use_cudnn_depthwise()`. In half precision it also depends on sizes.
  static bool mayBeDepthwiseOfCudnn(const Tensor& input, const Tensor& weight) {
    const auto is_contiguous = [](const Tensor& tensor) {
      return tensor.suggest_memory_format() == at::MemoryFormat::Contiguous;
    };
    return at::globalContext().userEnabledCuDNN() &&
           (input.scalar_type() == at::kHalf || !is_contiguous(input) || !is_contiguous(weight));
  }

  // `select_conv_backend()`.
  Backend decideBackend(const Tensor& input, const Tensor& weight) const {
    const bool is_planar = input.dim() == kDimsOf2d;
    if (input.numel() == 0 || weight.numel() == 0) {
      return Backend::kLibrary;
    }
    if (isDepthwise(input, weight) && !mayBeDepthwiseOfCudnn(input, weight)) {
      return is_planar ? Backend::kDepthwise2d : Backend::kDepthwise3d;
    }
    if (at::globalContext().userEnabledCuDNN()) {
      return Backend::kLibrary;
    }
    if (is_transposed_) {
      return is_planar ? Backend::kTransposed2d : Backend::kTransposed3d;
    }
    return is_planar && areAll(dilations_, 1) ? Backend::kSlow2d : Backend::kDilated;
  }

  bool is_transposed_;
  std::int64_t groups_;
  std::vector<std::int64_t> kernel_sizes_;
  std::vector<std::int64_t> strides_;
  std::vector<std::int64_t> paddings_;
  std::vector<std::int64_t> dilations_;
  Backend backend_;
};

// A tensor as a kernel reads it, and the block of its copy, if it was copied.
struct Operand {
  Tensor tensor;
  BlockNumber copy = -1;
};

Operand contiguous(KernelCall& call, const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return {tensor};
  }
  return {at::detail::empty_meta(tensor.sizes(), tensor.scalar_type()), call.copy(tensor)};
}

// `subtensor()`: the part of a group, in the memory format of the whole.
Operand partOf(KernelCall& call, const Tensor& whole, std::size_t dim, std::int64_t groups) {
  c10::DimVector sizes{whole.sizes()};
  sizes[dim] /= groups;
  const Tensor part = at::detail::empty_strided_meta(sizes, whole.strides(), whole.scalar_type());
  const at::MemoryFormat format = whole.suggest_memory_format();
  if (part.is_contiguous(format)) {
    return {part};
  }
  return {at::detail::empty_meta(sizes, whole.scalar_type(), format), call.copy(part)};
}

// The outputs of kernels: the results of the call or, with groups, parts that are concatenated at the end.
class Results {
 public:
  Results(KernelCall& call, std::int64_t groups) : call_{call}, has_groups_{groups > 1} {}

  void allocate(std::size_t i, std::int64_t bytes_of_part) {
    if (has_groups_) {
      parts_.at(i).push_back(call_.allocate(bytes_of_part));
    } else {
      call_.allocateResult(i);
    }
  }

  void concatenate() {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (!parts_.at(i).empty()) {
        call_.allocateResult(i);
      }
    }
    for (auto parts = parts_.rbegin(); parts != parts_.rend(); ++parts) {
      for (const BlockNumber part : *parts) {
        call_.free(part);
      }
    }
  }

 private:
  KernelCall& call_;
  bool has_groups_;
  std::array<std::vector<BlockNumber>, 3> parts_;
};

// The forward convolution of one group. The products of the samples use the same workspace in turn.
void convolve(KernelCall& call,
              const Geometry& geometry,
              const Tensor& input,
              const Tensor& weight,
              const Tensor& output,
              Results& results) {
  const bool is_transposed =
      geometry.backend() == Backend::kTransposed2d || geometry.backend() == Backend::kTransposed3d;
  const std::int64_t bytes = KernelCall::bytesOf(output);
  if (geometry.backend() == Backend::kTransposed3d) {  // its first output is resized
    const BlockNumber like_input = call.copy(input);
    results.allocate(0, bytes);
    call.free(like_input);
  } else {
    results.allocate(0, bytes);
  }
  const bool needs_columns = geometry.backend() != Backend::kSlow2d || geometry.needsColumns();
  const BlockNumber columns =
      needs_columns ? call.allocate(geometry.columns(is_transposed ? input : output, weight)) : -1;
  const std::int64_t of_positions = countPositions(output) * toSigned(output.element_size());
  const BlockNumber ones = is_transposed && call.has(2) ? call.allocate(of_positions) : -1;
  callBlas(call);
  call.free({ones, columns});
}

void convolution(KernelCall& call) {
  const Geometry geometry{call, Geometry::kStrideOfForward};
  if (geometry.backend() == Backend::kLibrary) {
    return;
  }
  const Operand input = contiguous(call, inTwoDimensions(call.tensor(0)));
  if (geometry.isDepthwise()) {
    call.allocateResult(0);
    call.free(input.copy);
    return;
  }
  const Operand weight = contiguous(call, inTwoDimensions(call.tensor(1)));
  Results results{call, geometry.groups()};
  const Tensor all = inTwoDimensions(call.result());
  c10::DimVector sizes{all.sizes()};
  sizes[1] /= geometry.groups();
  const Tensor output = at::detail::empty_meta(sizes, all.scalar_type());
  for (std::int64_t group = 0; group < geometry.groups(); ++group) {
    const Operand part = partOf(call, input.tensor, 1, geometry.groups());
    convolve(call, geometry, part.tensor, weight.tensor, output, results);
    call.free(part.copy);
  }
  results.concatenate();
  call.free({weight.copy, input.copy});
}

// The requested gradients: of the input, the weight and the bias.
struct Wanted {
  bool input;
  bool weight;
  bool bias;

  explicit Wanted(const c10::List<bool>& mask) : input{mask[0]}, weight{mask[1]}, bias{mask[2]} {}
};

// Sums a gradient over all dimensions but the channels, for the bias.
void sumForBias(KernelCall& call, const Tensor& gradient, std::int64_t dim_of_channels) {
  const std::vector<std::int64_t> dims = dimsBut(gradient, dim_of_channels);
  const Tensor result = at::detail::empty_meta({gradient.size(dim_of_channels)}, gradient.scalar_type());
  const std::int64_t accumulator = accumulatorBytes(gradient.scalar_type());
  reduceOnGpu(call, {gradient, result, c10::OptionalIntArrayRef{dims}, /*keepdim=*/false, accumulator});
}

// The gradients of one group.
class ConvolutionBackward {
 public:
  ConvolutionBackward(KernelCall& call,
                      const Geometry& geometry,
                      Results& results,
                      const Tensor& gradient,
                      const Tensor& input,
                      const Tensor& weight)
      : call_{call},
        geometry_{geometry},
        results_{results},
        wanted_{call.argument(10).toBoolList()},
        gradient_{gradient},
        input_{input},
        weight_{weight} {}

  void run() {
    switch (geometry_.backend()) {
      case Backend::kSlow2d:
        runSlow();
        break;
      case Backend::kDilated:
        runDilated();
        break;
      default:
        runTransposed();
    }
  }

 private:
  void allocateForInput() {
    results_.allocate(0, KernelCall::bytesOf(input_));
  }
  void allocateForWeight() {
    results_.allocate(1, KernelCall::bytesOf(weight_) / geometry_.groups());
  }
  void allocateForBias() {
    results_.allocate(2, gradient_.size(1) * toSigned(gradient_.element_size()));
  }

  void runSlow() {
    const Operand gradient = contiguous(call_, gradient_);
    const std::int64_t bytes = geometry_.columns(gradient_, weight_);
    BlockNumber columns = -1;
    if (wanted_.input) {
      allocateForInput();
      columns = call_.allocate(bytes);
      callBlas(call_);
    }
    if (wanted_.bias) {
      allocateForBias();
      sumForBias(call_, gradient.tensor, 1);
    }
    if (wanted_.weight) {
      allocateForWeight();
      columns = columns < 0 ? call_.allocate(bytes) : columns;
      callBlas(call_);
    }
    call_.free({columns, gradient.copy});
  }

  // Sums the gradient of each sample separately for the bias.
  void runDilated() {
    const Operand gradient = contiguous(call_, gradient_);
    if (wanted_.input) {
      allocateForInput();
    }
    if (wanted_.weight) {
      allocateForWeight();
    }
    if (wanted_.bias) {
      allocateForBias();
    }
    const bool multiplies = wanted_.input || wanted_.weight;
    const BlockNumber columns = multiplies ? call_.allocate(geometry_.columns(gradient_, weight_)) : -1;
    const Tensor sample = at::detail::empty_meta(gradient_.sizes().slice(1), gradient_.scalar_type());
    for (std::int64_t i = 0; i < gradient_.size(0); ++i) {
      if (multiplies) {
        callBlas(call_);
      }
      if (wanted_.bias) {
        const BlockNumber sum = call_.allocate(sample.size(0) * toSigned(sample.element_size()));
        sumForBias(call_, sample, 0);
        call_.free(sum);
      }
    }
    call_.free({columns, gradient.copy});
  }

  // Calls two functions, which each copy the gradient.
  void runTransposed() {
    if (wanted_.input) {
      const Operand gradient = contiguous(call_, gradient_);
      allocateForInput();
      multiplyColumns();
      call_.free(gradient.copy);
    }
    if (wanted_.weight) {
      allocateForWeight();
    }
    if (wanted_.bias) {
      allocateForBias();
    }
    if (wanted_.weight || wanted_.bias) {
      const Operand gradient = contiguous(call_, gradient_);
      multiplyColumns(/*multiplies=*/wanted_.weight);  // for the bias alone, the columns are allocated but unused
      call_.free(gradient.copy);
    }
  }

  void multiplyColumns(bool multiplies = true) {
    const BlockNumber columns = geometry_.needsColumns() ? call_.allocate(geometry_.columns(input_, weight_)) : -1;
    if (multiplies) {
      callBlas(call_);
    }
    call_.free(columns);
  }

  KernelCall& call_;
  const Geometry& geometry_;
  Results& results_;
  const Wanted wanted_;
  const Tensor& gradient_;
  const Tensor& input_;
  const Tensor& weight_;
};

// `conv_depthwise2d_backward()`, and a sum for the bias.
void depthwiseBackward2d(KernelCall& call, const Tensor& gradient, const Tensor& input, const Wanted& wanted) {
  if (wanted.input || wanted.weight) {
    const Operand contiguous_gradient = contiguous(call, gradient);
    if (wanted.weight) {
      const Operand contiguous_input = contiguous(call, input);
      call.allocateResult(1);
      call.free(contiguous_input.copy);
    }
    if (wanted.input) {
      call.allocateResult(0);
    }
    call.free(contiguous_gradient.copy);
  }
  if (wanted.bias) {
    call.allocateResult(2);
    sumForBias(call, gradient, 1);
  }
}

// `conv_depthwise3d_backward_cuda()`.
void depthwiseBackward3d(KernelCall& call, const Tensor& gradient, const Tensor& input, const Wanted& wanted) {
  if (wanted.input) {
    call.allocateResult(0);
  }
  if (wanted.weight) {
    call.allocateResult(1);
  }
  const Operand contiguous_gradient = contiguous(call, gradient);
  if (wanted.weight) {
    call.free(contiguous(call, input).copy);
  }
  if (wanted.bias) {
    call.allocateResult(2);
    sumForBias(call, gradient, 1);
  }
  call.free(contiguous_gradient.copy);
}

void convolutionBackward(KernelCall& call) {
  const Geometry geometry{call, Geometry::kStrideOfBackward};
  if (geometry.backend() == Backend::kLibrary) {
    return;
  }
  const Tensor gradient = inTwoDimensions(call.tensor(0));
  const Tensor given = inTwoDimensions(call.tensor(1));
  if (geometry.isDepthwise()) {
    // A one-dimensional input is copied before it is viewed in two dimensions.
    const Operand input = call.tensor(1).dim() == kDimsOf1d ? contiguous(call, given) : Operand{given};
    const auto run = geometry.backend() == Backend::kDepthwise2d ? depthwiseBackward2d : depthwiseBackward3d;
    run(call, gradient, input.tensor, Wanted{call.argument(10).toBoolList()});
    call.free(input.copy);
    return;
  }
  const Operand input = contiguous(call, given);
  const Operand weight = contiguous(call, inTwoDimensions(call.tensor(2)));
  Results results{call, geometry.groups()};
  for (std::int64_t group = 0; group < geometry.groups(); ++group) {
    const bool is_whole = geometry.groups() == 1;
    const Operand gradient_part = is_whole ? Operand{gradient} : partOf(call, gradient, 1, geometry.groups());
    const Operand input_part = partOf(call, input.tensor, 1, geometry.groups());
    ConvolutionBackward{call, geometry, results, gradient_part.tensor, input_part.tensor, weight.tensor}.run();
    call.free({input_part.copy, gradient_part.copy});
  }
  results.concatenate();
  call.free({weight.copy, input.copy});
}

const KernelRules kConvolutionRules{
    {convolution, {"aten::convolution"}},
    {convolutionBackward, {"aten::convolution_backward"}},
};

}  // namespace

}  // namespace torchext
