"""Functions that compute metadata instead of PyTorch's Meta kernels, or correct what these return.

The results of some kernels differ from those of their Meta kernels, and some operators have no Meta kernel. Each
function here handles a few operators. It gets the call, and returns results on the meta device. A result on another
device keeps that device. A result may be a view of a larger tensor: then the storage of the fake is as large.

Metadata of results are remembered, so a function rarely runs twice for equal arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .. import _C
from ..internals.leases import while_fakes_live
from ..internals.patching import DIFFERENCES, Function
from .cuda.devices import while_devices_exist

__all__ = ["MetaCall"]

Results = tuple[Any, ...]
Override = Callable[..., Results]
Layouts = list[Callable[[Tensor], Tensor]]

# Functions by operator. An operator may have a wrapping and a completing one.
_REPLACING: dict[str, Override] = {}
_WRAPPING: dict[str, Override] = {}
_COMPLETING: dict[str, Override] = {}


class MetaCall:
    """A call of an operator with its tensors on the meta device."""

    def __init__(self, device: torch.device, arguments: dict[str, Any], run: Override | None = None) -> None:
        self.device = device
        """The device of the fakes."""
        self.arguments = arguments
        """The arguments, by their names in the schema."""
        self._run = run

    def __getitem__(self, name: str) -> Any:
        """Return an argument."""
        return self.arguments[name]

    def tensors(self) -> list[Tensor]:
        """Return the arguments that are tensors, without those in lists."""
        return [value for value in self.arguments.values() if isinstance(value, Tensor)]

    def run(self, **changed: object) -> Results:
        """Call PyTorch's Meta kernel, with `changed` instead of these arguments. Return all results in a tuple."""
        assert self._run is not None, "only functions that wrap a Meta kernel run it"
        return self._run(changed)


def _register(functions: dict[str, Override], operators: str) -> Callable[[Override], Override]:
    def register(function: Override) -> Override:
        functions.update(dict.fromkeys((f"aten::{name}" for name in operators.split()), function))
        return function

    return register


_replaces = partial(_register, _REPLACING)  # the function computes the results: the Meta kernel is missing or wrong
_wraps = partial(_register, _WRAPPING)  # the function runs the Meta kernel, with other arguments or for other results
_completes = partial(_register, _COMPLETING)  # the function gets the results after all checks and other corrections


def _empty(sizes: Any, like: Tensor, **options: Any) -> Tensor:
    return torch.empty(sizes, **{"dtype": like.dtype, "device": "meta", **options})


def _empty_like(tensor: Tensor) -> Tensor:
    return _empty(tensor.shape, tensor)


def _on_larger_storage(result: Tensor, numel: int) -> Tensor:
    """Return a tensor like `result` on a storage of at least `numel` elements."""
    is_large = result.untyped_storage().nbytes() >= numel * result.element_size()
    return result if is_large else _empty(numel, result).as_strided(result.shape, result.stride())


def _in_format(memory_format: torch.memory_format, result: Tensor) -> Tensor:
    if result.dim() == 3 and memory_format is torch.channels_last:  # of a convolution
        return _in_format(memory_format, result.unsqueeze(2)).squeeze(2)
    return _empty(result.shape, result, memory_format=memory_format)


def _in_format_of(tensor: Tensor, result: Tensor) -> Tensor:
    return _in_format(suggest_memory_format(tensor), result)


# ---- Statistics that processes exchange in `torch.nn.SyncBatchNorm` (Normalization.cu)


def _for_each_channel(channels: int, like: Tensor) -> Tensor:
    """Return a tensor of the dtype in which CUDA kernels accumulate floats (`toAccumulateType()` of ATen)."""
    is_reduced = like.dtype in (torch.float16, torch.bfloat16)
    return _empty(channels, like, dtype=torch.float32 if is_reduced else like.dtype)


@_replaces("batch_norm_stats")
def _batch_norm_stats(call: MetaCall) -> Results:
    x = call["input"]
    return _for_each_channel(x.size(1), x), _for_each_channel(x.size(1), x)


@_replaces("batch_norm_gather_stats_with_counts")
def _batch_norm_gather_stats(call: MetaCall) -> Results:
    mean = call["mean"]  # has one row for each process
    return _for_each_channel(mean.size(1), mean), _for_each_channel(mean.size(1), mean)


@_replaces("batch_norm_elemt batch_norm_backward_elemt")
def _like_input(call: MetaCall) -> Results:
    return (torch.empty_like(call["input"]),)


@_replaces("batch_norm_backward_reduce")
def _batch_norm_backward_reduce(call: MetaCall) -> Results:
    mean = call["mean"]
    weight = mean if call["weight"] is None else call["weight"]
    wanted = (mean, call["input_g"]), (mean, call["input_g"]), (weight, call["weight_g"]), (weight, call["bias_g"])
    return tuple(_empty_like(like) if is_wanted else None for like, is_wanted in wanted)


# ---- Fused cells of `torch.nn.LSTM` and `torch.nn.GRU` on CUDA (RNN.cu)


@_replaces("_thnn_fused_lstm_cell")
def _fused_lstm_cell(call: MetaCall) -> Results:
    # PyTorch's Meta kernel fails without biases.
    return _empty_like(call["cx"]), _empty_like(call["cx"]), _empty_like(call["input_gates"])


@_replaces("_thnn_fused_gru_cell")
def _fused_gru_cell(call: MetaCall) -> Results:
    hx = call["hx"]
    return _empty_like(hx), _empty((hx.size(0), 5 * hx.size(1)), hx)  # the workspace has five values for each unit


@_replaces("_thnn_fused_gru_cell_backward")
def _fused_gru_cell_backward(call: MetaCall) -> Results:
    grad = call["grad_hy"]
    batch, units = grad.size(0), grad.size(1)
    gates = [_empty((batch, 3 * units), grad) for _ in range(2)]
    biases = [_empty(3 * units, grad) if call["has_bias"] else None for _ in range(2)]
    return (*gates, _empty_like(grad), *biases)


# ---- Other operators that have only CUDA kernels


@_replaces("cudnn_grid_sampler")
def _cudnn_grid_sampler(call: MetaCall) -> Results:
    x, grid = call["self"], call["grid"]
    # `cudnn_grid_sampler_forward()`
    if x.dim() != 4 or grid.dim() != 4 or x.shape[0] != grid.shape[0] or grid.shape[3] != 2 or x.shape[1] > 1024:
        raise RuntimeError("Invalid arguments to cudnn_grid_sampler")
    return (_empty((*x.shape[:2], *grid.shape[1:3]), x),)


@_replaces("cudnn_grid_sampler_backward")
def _cudnn_grid_sampler_backward(call: MetaCall) -> Results:
    return _empty_like(call["self"]), _empty_like(call["grid"])


@_replaces("_use_cudnn_ctc_loss _use_cudnn_ctc_loss.Tensor _use_miopen_ctc_loss _use_miopen_ctc_loss.Tensor")
def _use_pytorchs_ctc_loss(call: MetaCall) -> Results:
    return (False,)


@_replaces("_efficient_attention_backward")
def _efficient_attention_backward(call: MetaCall) -> Results:
    """PyTorch's Meta kernel lacks the argument `out`."""
    names = ("grad_out_", "query", "key", "value")
    if any(call[name].dim() != 4 or call[name].dtype != call["grad_out_"].dtype for name in names):
        raise RuntimeError("_efficient_attention_backward() expects four tensors of four dimensions and one dtype.")
    query, key, value = (call[name] for name in names[1:])
    gradients = [_empty_like(tensor) for tensor in (query, key, value)]
    if call["shared_storage_dqdkdv"]:
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("seqlen must match for `shared_storage_dqdkdv")
        if query.shape[3] != key.shape[3]:
            raise RuntimeError("embedding dim must match for `shared_storage_dqdkdv")
        gradients = list(_empty((*query.shape[:-2], 3, *query.shape[-2:]), query).unbind(-3))
    bias = call["bias"]
    if bias is None or not call["bias_requires_grad"]:
        return (*gradients, None)
    aligned = math.ceil(bias.shape[-1] / 16) * 16  # elements of a row
    return (*gradients, _empty((*bias.shape[:-1], aligned), bias)[..., : bias.shape[-1]])


# ---- Operators whose CPU kernels read values


@_replaces("_padded_dense_to_jagged_forward")
def _padded_dense_to_jagged(call: MetaCall) -> Results:
    """The CPU kernel compares the length with the last offset."""
    dense, dims = call["dense"], len(call["offsets"])
    if dense.dim() <= dims:
        raise RuntimeError(f"_padded_dense_to_jagged_forward(): expected padded dim >= {dims + 1}, got {dense.dim()}")
    return (_empty((call["total_L"], *dense.shape[dims + 1 :]), dense),)


@_replaces("_validate_compressed_sparse_indices")
def _validate_compressed_sparse_indices(call: MetaCall) -> Results:
    """If the values are known, the real kernel runs."""
    return ()


# ---- Storages that are larger than the result


@_completes("mse_loss smooth_l1_loss soft_margin_loss binary_cross_entropy")
def _loss(call: MetaCall, result: Tensor) -> Results:
    """Losses compute an element for each input, and shrink their result after the reduction (Loss.cpp, Loss.cu)."""
    x, target = call["self"].shape, call["target"].shape
    if call["reduction"] != 0:
        result = _on_larger_storage(result, math.prod(x if x == target else torch.broadcast_shapes(x, target)))
    return (result,)


@_completes("im2col col2im")
def _folded(call: MetaCall, result: Tensor) -> Results:
    """The result was like the argument before it was resized (`col2im_cpu()`, `im2col_cuda()`)."""
    return (_on_larger_storage(result, call["self"].numel()),)


@_completes("kaiser_window kaiser_window.periodic kaiser_window.beta")
def _kaiser_window(call: MetaCall, result: Tensor) -> Results:
    """A periodic window is the start of a window with one more element (TensorFactories.cpp)."""
    is_longer = call.arguments.get("periodic", True) and result.numel() > 1
    return (_on_larger_storage(result, result.numel() + 1) if is_longer else result,)


# ---- Results that depend on the device or on an argument


@_completes("log_sigmoid_forward")
def _log_sigmoid(call: MetaCall, output: Tensor, buffer: Tensor) -> Results:
    """`log_sigmoid_forward_cuda()` saves nothing for the backward pass."""
    return output, _empty(0, call["self"]) if call.device.type == "cuda" else buffer


@_completes("_native_multi_head_attention")
def _multi_head_attention(call: MetaCall, output: Tensor, weights: Tensor) -> Results:
    """Weights are undefined unless they are requested (`native_multi_head_attention_cpu()`, attention.cpp)."""
    return output, weights if call["need_weights"] else None


@_completes("_scaled_dot_product_efficient_attention _efficient_attention_forward")
def _efficient_attention(call: MetaCall, output: Tensor, log_sum: Tensor, *states: Any) -> Results:
    """The state of the generator is on the CPU, unless a CUDA graph is captured (attention.cu)."""
    if call.device.type != "cuda" or not (call["dropout_p"] or DIFFERENCES["attention_state_on_cpu"].applies):
        return (output, log_sum, *states)
    on_cpu = [torch.empty(state.shape, dtype=state.dtype, device="cpu") for state in states[:2]]
    return (output, log_sum, *on_cpu, *states[2:])


@_wraps(
    "linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Tensor "
    "logspace.Tensor_Scalar logspace.Scalar_Tensor"
)
def _range_between_tensors(call: MetaCall) -> Results:
    """Real kernels read the bounds as numbers before they infer the dtype (`linspace()`, TensorFactories.cpp)."""
    bounds = call["start"], call["end"]
    is_complex = any(
        bound.is_complex() if isinstance(bound, Tensor) else isinstance(bound, complex) for bound in bounds
    )
    if call["dtype"] is None and is_complex:
        return call.run(dtype=torch.get_default_dtype().to_complex())
    return call.run()


@_wraps("where.self where.self_out")
def _where(call: MetaCall) -> Results:
    """The Meta kernel refuses masks of bytes."""
    condition = call["condition"]
    if condition.dtype is not torch.uint8:
        return call.run()
    return call.run(condition=torch.empty_strided(condition.shape, condition.stride(), dtype=torch.bool, device="meta"))


@_wraps("nll_loss_forward nll_loss_forward.output")
def _nll_loss(call: MetaCall) -> Results:
    """The Meta kernel refuses a target of shape (1,) for an input without a batch."""
    is_single = call["self"].dim() == 1 and call["target"].shape == (1,)
    return call.run(target=call["target"][0]) if is_single else call.run()


# ---- Memory formats and strides


@_wraps("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor poisson")
def _contiguous(call: MetaCall) -> Results:
    """The kernels return a contiguous result (DistributionTemplates.h, Distributions.cpp)."""
    (result,) = call.run()
    return (_empty_like(result),)


@_wraps("floor_divide native_dropout_backward")
def _laid_out_by_iterator(call: MetaCall) -> Results:
    """A TensorIterator over the first two arguments determines strides, whose order PyTorch's references lose."""
    (result,) = call.run()
    return (_C.result_of_iterator(call.tensors()[:2], result.dtype) if call.tensors() else result,)


@_wraps(
    "arange.out arange.start_out range.out range.out_ fft_fftfreq.out fft_rfftfreq.out "
    "linspace.out linspace.Tensor_Tensor_out linspace.Tensor_Scalar_out linspace.Scalar_Tensor_out "
    "logspace.out logspace.Tensor_Tensor_out logspace.Tensor_Scalar_out logspace.Scalar_Tensor_out"
)
def _range_into(call: MetaCall) -> Results:
    """An `out` of any shape is filled if it has the right number of elements (RangeFactories.cpp)."""
    out = call["out"]
    flat = _empty(out.numel(), out)
    call.run(out=flat)
    if flat.numel() != out.numel():
        out.resize_(flat.shape)
    return (out,)


@_completes("max_unpool2d channel_shuffle")
def _in_format_of_argument(call: MetaCall, result: Tensor) -> Results:
    """The CPU kernels keep the format (`max_unpooling2d_forward_out_cpu`, `channel_shuffle()`)."""
    return (_in_format_of(call["self"], result) if call.device.type == "cpu" else result,)


@_completes("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats _batch_norm_with_update")
def _batch_norm(call: MetaCall, output: Tensor, *results: Tensor, saves_statistics: bool = True) -> Results:
    """The CPU kernel keeps the memory format, and saves no statistics in evaluation (`batch_norm_cpu`)."""
    if call.device.type != "cpu":
        return (output, *results)
    statistics = _with_dtype_of_cpu(call, *results[:2])
    if not saves_statistics or not call.arguments.get("training", True):
        statistics = [_empty(0, statistic) for statistic in statistics]
    return (_in_format_of(call["input"], output), *statistics, *results[2:])


@_completes("_native_batch_norm_legit_no_training _batch_norm_no_update")
def _batch_norm_in_evaluation(call: MetaCall, *results: Tensor) -> Results:
    return _batch_norm(call, *results, saves_statistics=False)


@_completes("native_layer_norm native_group_norm")
def _other_norm(call: MetaCall, output: Tensor, *statistics: Tensor) -> Results:
    return (output, *(_with_dtype_of_cpu(call, *statistics) if call.device.type == "cpu" else statistics))


def _with_dtype_of_cpu(call: MetaCall, *statistics: Tensor) -> list[Tensor]:
    """Return statistics in the dtype of the input, or float32 if only it is reduced (`is_mixed_type()`)."""
    first, *parameters = call.tensors()
    is_reduced = first.dtype in (torch.float16, torch.bfloat16)
    is_mixed = is_reduced and any(parameter.dtype is torch.float32 for parameter in parameters)
    dtype = torch.float32 if is_mixed else first.dtype
    return [_empty(statistic.shape, statistic, dtype=dtype) for statistic in statistics]


@_completes("native_batch_norm_backward batch_norm_backward")
def _batch_norm_backward(call: MetaCall, gradient: Tensor | None, *rest: Tensor | None) -> Results:
    """The CPU kernel returns a gradient in the memory format of the input (`batch_norm_backward_cpu`)."""
    if gradient is None or call.device.type != "cpu":
        return (gradient, *rest)
    return (_in_format_of(call["input"], gradient), *rest)


@_completes("_fft_r2c _fft_c2c")
def _fourier(call: MetaCall, result: Tensor) -> Results:
    """With MKL, batch dimensions follow the order of the input's strides (`_exec_fft()`, SpectralOps.cpp).

    For equal strides (the gradient of a sum), the order depends on `std::partition()`, which the Meta kernel does not
    imitate.
    """
    x: Tensor = call["self"]
    if call.device.type != "cpu" or not torch.backends.mkl.is_available() or len(set(x.stride())) == x.dim():
        return (result,)
    transformed = {dim % x.dim() for dim in call["dim"]}
    order = _partitioned(list(range(x.dim())), transformed)
    num_batch = x.dim() - len(transformed)
    order[:num_batch] = sorted(order[:num_batch], key=lambda dim: x.stride()[dim], reverse=True)
    strides = list(result.stride())
    stride = math.prod(result.shape[dim] for dim in transformed)
    for dim in reversed(order[:num_batch]):
        strides[dim] = stride
        stride *= result.shape[dim]
    return (torch.empty_strided(result.shape, strides, dtype=result.dtype, device="meta"),)


def _partitioned(dims: list[int], last: set[int]) -> list[int]:
    """Put the dimensions of `last` behind the others, in the order that `std::partition()` of libstdc++ leaves."""
    begin, end = 0, len(dims)
    while True:
        while begin < end and dims[begin] not in last:
            begin += 1
        while begin < end and dims[end - 1] in last:
            end -= 1
        if begin >= end:
            return dims
        dims[begin], dims[end - 1] = dims[end - 1], dims[begin]
        begin, end = begin + 1, end - 1


# ---- Convolutions
#
# PyTorch chooses a library for each convolution (`select_conv_backend()`, Convolution.cpp), mainly by the device. While
# it does, it checks shapes, and the library decides whether results are channels last. On the meta device, no library
# is chosen, and results are contiguous (`meta_conv()`, _meta_registrations.py).


_ATEN: Any = torch._C  # its stub declares other names and arguments for the functions below


def _library(call: MetaCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return PyTorch's choice for these tensors. Raise its errors for their shapes."""
    if "bias" in call.arguments:
        bias_sizes = None if call["bias"] is None else list(call["bias"].shape)
    else:
        bias_sizes = call["bias_sizes"]
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return _ATEN._select_conv_backend(x, weight, bias, *(call[name] for name in names), bias_sizes)


@_wraps("convolution convolution.out")
def _check_convolution(call: MetaCall) -> Results:
    if call["weight"].dim() < 3:  # `select_conv_backend()` expects that another function has checked it
        raise RuntimeError("weight should have at least three dimensions")
    _library(call, call["input"], call["weight"], call["bias"])
    return call.run()


@_completes("convolution _convolution _convolution.deprecated convolution_backward")
def _convolution(call: MetaCall, *results: Tensor | None) -> Results:
    """Lay out the output, or the gradients of the input and the weight."""
    x, weight = call["input"], call["weight"]
    layouts: Layouts
    is_empty = 0 in x.shape[:2]  # `ConvBackend::Empty`
    x = x.contiguous() if x.dim() == 3 and not is_empty else x
    if is_empty and len(results) > 1:
        layouts = [partial(_like, x), partial(_like, weight)]
    elif call.device.type == "cpu" and not is_empty:
        layouts = _layouts_on_cpu(call, x, weight)
    elif call.device.type == "cuda" and not is_empty:
        layouts = _layouts_on_cuda(x, weight)
    else:
        return results
    laid_out = (
        result if result is None else lay_out(result) for result, lay_out in zip(results, layouts, strict=False)
    )
    return (*laid_out, *results[2:])


def _layouts_on_cuda(x: Tensor, weight: Tensor) -> Layouts:
    """Return the layouts of cuDNN, which keeps the format, except for float64.

    `select_conv_backend()` would initialize CUDA.
    """
    return [partial(_in_format, _format_on_cuda(x, weight))] * 2


def _format_on_cuda(x: Tensor, weight: Tensor) -> torch.memory_format:
    uses_cudnn = torch.backends.cudnn.enabled and torch.float64 not in (x.dtype, weight.dtype)
    return _format_of_either(x, weight) if uses_cudnn else torch.contiguous_format


@while_devices_exist.replaces(_ATEN, "_conv_determine_backend_memory_format", reason="looks for cuDNN in this build")
def _determine_format(original: Function, x: Tensor, weight: Tensor, backend: Any) -> Any:
    """Return the format that `FakeTensorMode` gives the results of convolutions while a compiler traces."""
    if not _C.fake_cuda_devices() or not x.is_cuda:
        return original(x, weight, backend)
    return _format_on_cuda(x, weight)


def _layouts_on_cpu(call: MetaCall, x: Tensor, weight: Tensor) -> Layouts:
    """Return the layouts of the library that PyTorch chooses.

    Some libraries compute one group after the other. Then the format of the output is that of concatenated outputs, and
    the gradient of a group is like its part of the weight.
    """
    try:
        zeros = _C.read_only_zeros_like(x), _C.read_only_zeros_like(weight)
    except torch.OutOfMemoryError:  # larger than the address space
        return [partial(_in_format, _format_of_either(x, weight))] * 2
    library = _library(call, *zeros)
    libraries = _ATEN._ConvBackend
    memory_format = _ATEN._conv_determine_backend_memory_format(*map(_in_two_dimensions, zeros), library)
    in_format = partial(_in_format, memory_format)
    if library == libraries.SlowTranspose3d and call["groups"] == 1:  # the output was like the input, then resized
        return [lambda output: _on_larger_storage(in_format(output), x.numel()), in_format]
    if library not in (libraries.Slow2d, libraries.SlowDilated2d, libraries.SlowTranspose2d):
        return [in_format] * 2
    weight = _in_two_dimensions(weight)
    if library == libraries.SlowDilated2d:
        gradient = in_format(weight)
    else:
        gradient = weight.contiguous(memory_format=memory_format)
    part = gradient.narrow(0, 0, gradient.size(0) // call["groups"])
    format_of_parts = suggest_memory_format(part.contiguous(memory_format=suggest_memory_format(gradient)))
    return [partial(_in_format_of_groups, memory_format, call["groups"]), partial(_in_format, format_of_parts)]


def _format_of_either(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Decide like `cudnn_conv_suggest_memory_format()`, but without checking whether cuDNN exists."""
    formats = {suggest_memory_format(_in_two_dimensions(tensor)) for tensor in (x, weight)}
    return next(iter(formats - {torch.contiguous_format}), torch.contiguous_format)


def _in_two_dimensions(tensor: Tensor) -> Tensor:
    """Return the tensor as `_convolution()` uses it."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _in_format_of_groups(memory_format: torch.memory_format, groups: int, result: Tensor) -> Tensor:
    """Return the tensor in the format that `at::cat()` finds for the outputs of groups.

    Strides of one channel and one pixel determine no format.
    """
    whole = _in_two_dimensions(_in_format(memory_format, result))
    batch, channels, *size = whole.shape
    part = _in_format_of(whole, whole.new_empty(batch, channels // groups, *size))
    return _in_format(suggest_memory_format(part), result)


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    return tensor.to(result.dtype, copy=True)  # of meta tensors without elements, `empty_like()` loses the strides


while_fakes_live.declare(partial(_C.set_meta_overrides, MetaCall, _REPLACING, _WRAPPING, _COMPLETING))
