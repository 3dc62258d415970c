#include "convolutions.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/Storage.h>

#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/kernel_threads.h"

namespace torchext {

using at::MemoryFormat;

namespace {

constexpr std::string_view kBackward = "aten::convolution_backward";

constexpr int64_t kDimsOf1d = 3;  // of the input and the weight of `conv1d`
constexpr int64_t kDimsOf2d = 4;

// The arguments that a convolution and its backward operator share.
struct Convolution {
  Tensor input;
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<std::vector<c10::SymInt>> bias_sizes;
  std::vector<c10::SymInt> stride;
  std::vector<c10::SymInt> padding;
  std::vector<c10::SymInt> dilation;
  bool is_transposed;
  std::vector<c10::SymInt> output_padding;
  c10::SymInt groups;

  // Takes the arguments of the forward operator, or those of the backward operator without the first.
  explicit Convolution(ArrayRef<IValue> arguments)
      : input{arguments[0].toTensor()},
        weight{arguments[1].toTensor()},
        stride{arguments[3].toSymIntVector()},
        padding{arguments[4].toSymIntVector()},
        dilation{arguments[5].toSymIntVector()},
        is_transposed{arguments[6].toBool()},
        output_padding{arguments[7].toSymIntVector()},
        groups{arguments[8].toSymInt()} {
    if (arguments[2].isTensor()) {
      bias = arguments[2].toTensor().defined() ? std::optional{arguments[2].toTensor()} : std::nullopt;
    } else if (!arguments[2].isNone()) {
      bias_sizes = arguments[2].toSymIntVector();
    }
    if (bias) {
      bias_sizes = bias->sym_sizes().vec();
    }
  }
};

at::native::ConvBackend backendOf(const Convolution& convolution) {
  return at::native::select_conv_backend(
      convolution.input, convolution.weight, convolution.bias, convolution.stride, convolution.padding,
      convolution.dilation, convolution.is_transposed, convolution.output_padding, convolution.groups,
      convolution.bias_sizes ? at::OptionalSymIntArrayRef(*convolution.bias_sizes) : std::nullopt);
}

template <typename Map>
Convolution withTensors(Convolution convolution, const Map& map) {
  convolution.input = map(convolution.input);
  convolution.weight = map(convolution.weight);
  convolution.bias = convolution.bias ? std::optional{map(*convolution.bias)} : std::nullopt;
  return convolution;
}

// Returns a CPU tensor of zeros with the geometry of `tensor`. It occupies no memory.
Tensor onCpu(const Tensor& tensor) {
  const std::size_t nbytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), c10::elementSize(tensor.scalar_type()));
  return makeStridedTensor(makeReadOnlyZeroStorage(nbytes), tensor.scalar_type(), tensor.sizes(), tensor.strides(),
                           /*storage_offset=*/0, {});
}

// Returns the input and the weight as `_convolution()` uses them: in two dimensions instead of one.
std::pair<Tensor, Tensor> inTwoDimensions(const Convolution& convolution) {
  return convolution.weight.dim() == kDimsOf1d
             ? std::pair{convolution.input.unsqueeze(2), convolution.weight.unsqueeze(2)}
             : std::pair{convolution.input, convolution.weight};
}

bool isEitherDouble(const Convolution& convolution) {
  return convolution.input.scalar_type() == c10::kDouble || convolution.weight.scalar_type() == c10::kDouble;
}

// Returns the format in which libraries that support all formats compute. Decides as
// `cudnn_conv_suggest_memory_format()` does, but without checking whether cuDNN exists.
MemoryFormat formatOfInput(const Convolution& convolution) {
  const auto [input, weight] = inTwoDimensions(convolution);
  const MemoryFormat format = weight.dim() == kDimsOf2d ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
  const bool is_either = input.suggest_memory_format() == format || weight.suggest_memory_format() == format;
  return is_either ? format : MemoryFormat::Contiguous;
}

MemoryFormat formatOnCuda(const Convolution& convolution) {
  const bool is_cudnns = at::globalContext().userEnabledCuDNN() && !isEitherDouble(convolution);
  return is_cudnns ? formatOfInput(convolution) : MemoryFormat::Contiguous;
}

// How a device lays out the results of a convolution.
struct Formats {
  MemoryFormat output{MemoryFormat::Contiguous};  // and of the gradient of the input
  MemoryFormat weight{MemoryFormat::Contiguous};  // of its gradient
  int64_t groups{1};                              // whose outputs are concatenated

  explicit Formats(MemoryFormat format) : output{format}, weight{format} {}
};

// Returns the format that `at::cat()` finds for the outputs of groups, which `whole` consists of. Strides of one
// channel and one pixel determine none.
MemoryFormat formatOfOutputs(const Tensor& whole, int64_t groups) {
  c10::DimVector sizes(whole.sizes());
  sizes[1] /= groups;
  return at::empty(sizes, whole.options().memory_format(whole.suggest_memory_format())).suggest_memory_format();
}

// Returns the format that `at::cat()` finds for the gradients of groups, which are like the parts of `weight`.
MemoryFormat formatOfGradients(const Tensor& weight, int64_t groups) {
  const Tensor part = weight.narrow(0, 0, weight.size(0) / groups);
  return part.contiguous(weight.suggest_memory_format()).suggest_memory_format();
}

// These backends compute one group after the other.
bool isSlow(at::native::ConvBackend backend) {
  using at::native::ConvBackend;
  return backend == ConvBackend::Slow2d || backend == ConvBackend::SlowDilated2d ||
         backend == ConvBackend::SlowTranspose2d;
}

// Returns the meta `weight` as such a backend allocates its gradient: dilated convolutions in the format of all
// results, others in the format of the strides that the weight has.
Tensor laidOutAsGradient(const Tensor& weight, at::native::ConvBackend backend, MemoryFormat format) {
  return backend == at::native::ConvBackend::SlowDilated2d
             ? at::empty(weight.sizes(), weight.options().memory_format(format))
             : weight.contiguous(format);
}

Formats formatsOnCpu(const Convolution& convolution) {
  try {
    const Convolution on_cpu = withTensors(convolution, onCpu);
    const at::native::ConvBackend backend = backendOf(on_cpu);
    const auto [input, weight] = inTwoDimensions(on_cpu);
    Formats formats{at::native::_determine_backend_memory_format(input, weight, backend)};
    if (isSlow(backend)) {
      formats.groups = on_cpu.groups.expect_int();
      const Tensor gradient = laidOutAsGradient(inTwoDimensions(convolution).second, backend, formats.output);
      formats.weight = formatOfGradients(gradient, formats.groups);
    }
    return formats;
  } catch (const c10::OutOfMemoryError&) {  // larger than the address space
    return Formats{formatOfInput(convolution)};
  }
}

// Returns true if the backend is `ConvBackend::Empty`, which all devices then use.
bool isEmpty(const Convolution& convolution) {
  return convolution.input.size(0) == 0 || convolution.input.size(1) == 0;
}

Formats formatsOn(c10::Device device, Convolution convolution) {
  if (convolution.weight.dim() == kDimsOf1d) {
    convolution.input = convolution.input.contiguous();
  }
  return device.is_cuda() ? Formats{formatOnCuda(convolution)} : formatsOnCpu(convolution);
}

Tensor laidOut(const Tensor& meta, MemoryFormat format, int64_t groups = 1) {
  if (meta.dim() == kDimsOf1d && format == MemoryFormat::ChannelsLast) {
    return laidOut(meta.unsqueeze(2), format, groups).squeeze(2);
  }
  Tensor result = at::empty(meta.sizes(), meta.options().memory_format(format));
  return groups == 1 ? result : laidOut(meta, formatOfOutputs(result, groups));
}

// Gives `meta` the strides that `zeros_like(other)` has.
Tensor laidOutLike(const Tensor& meta, const Tensor& other) {
  const c10::DimVector strides = other.is_non_overlapping_and_dense()
                                     ? c10::DimVector(other.strides())
                                     : c10::DimVector(at::infer_dense_strides(other.sizes(), other.strides()));
  return at::empty_strided(meta.sizes(), strides, meta.options());
}

}  // namespace

bool isConvolution(const OperatorHandle& op) {
  return op.schema().name() == "aten::convolution";
}

bool hasFormatOfConvolution(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return isConvolution(op) || name == "aten::_convolution" || name == kBackward;
}

bool isSameOnOneThread(const OperatorHandle& op, ArrayRef<IValue> arguments, bool only_checks) {
  if (!isConvolution(op)) {
    return true;
  }
  const Convolution convolution{arguments};
  // All kernels accept float32. Only those of transposed convolutions make different checks.
  const auto is_accepted = [](const Tensor& tensor) {
    return tensor.scalar_type() == c10::kFloat && tensor.numel() > 0;
  };
  if (only_checks && !convolution.is_transposed && allTensors(arguments, is_accepted)) {
    return true;
  }
  try {
    const auto backend = backendOf(convolution);
    const OneThread one_thread{true};
    return backend == backendOf(convolution);
  } catch (const c10::Error&) {
    return false;
  }
}

void checkShapesOfConvolution(ArrayRef<IValue> arguments) {
  backendOf(withTensors(Convolution{arguments}, emptyOnMeta));
}

void giveMemoryFormat(const OperatorHandle& op, ArrayRef<IValue> arguments, c10::Device device, Stack& results) {
  const bool is_backward = op.schema().name() == kBackward;
  const Convolution convolution = withTensors(Convolution{is_backward ? arguments.slice(1) : arguments}, emptyOnMeta);
  const std::size_t count = op.schema().returns().size();
  const auto give = [&](std::size_t position, const auto& layOut) {
    IValue& result = torch::jit::peek(results, position, count);
    if (result.isTensor() && result.toTensor().defined()) {
      result = layOut(result.toTensor());
    }
  };
  if (isEmpty(convolution)) {
    if (is_backward) {
      give(0, [&](const Tensor& gradient) { return laidOutLike(gradient, convolution.input); });
      give(1, [&](const Tensor& gradient) { return laidOutLike(gradient, convolution.weight); });
    }
    return;
  }
  const Formats formats = formatsOn(device, convolution);
  give(0, [&](const Tensor& output) { return laidOut(output, formats.output, formats.groups); });
  if (is_backward) {
    give(1, [&](const Tensor& gradient) { return laidOut(gradient, formats.weight); });  // that of the bias has one dim
  }
}

}  // namespace torchext
