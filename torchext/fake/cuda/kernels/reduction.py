"""Memory of reductions, normalization, softmax, dropout and recurrent cells.

Reductions are those in the Reduce*Kernel.cu in ATen/native/cuda, and in ReduceOps.cpp, which calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .buffers import accumulator_bytes, reduce_on_gpu
from .calls import Geometry, KernelCall, contiguous, copying, divide_up, is_reduced, iteration_order, last_power, rule

__all__: list[str] = []

PAIR = 16  # bytes of a value and its index


class _Dims:
    """The reduced dimensions of a call: the arguments at these indices, if there are any."""

    def __init__(self, call: KernelCall, dims: int | None = None, keepdim: int | None = None) -> None:
        given = None if dims is None else call.arguments[dims]
        self.dims: Sequence[int] | None = [given] if isinstance(given, int) else given
        self.keepdim: bool = keepdim is not None and call.arguments[keepdim]


def _reduce(call: KernelCall, source: Geometry, dims: _Dims, accumulator: int, vector: int = 4) -> None:
    """Reduce `source` to all results of the call."""
    reduce_on_gpu(call, source, call.results, dims.dims, keepdim=dims.keepdim, accumulator=accumulator, vector=vector)


def _reduce_in_dtype_of_result(call: KernelCall, *, dims: int | None = None, keepdim: int | None = None) -> None:
    """Copy a source of another dtype than the result, except from half precision to float."""
    call.allocate_results()
    source, dtype = call.tensor(0), call.result().dtype
    if source.dtype is not dtype and not (is_reduced(source.dtype) and dtype is torch.float32):
        strides = source.strides if source.is_dense() else _dense_strides(source)  # as `to()` makes them
        source = Geometry(source.sizes, strides, dtype)
        call.copy(source)
    _reduce(call, source, _Dims(call, dims, keepdim), accumulator_bytes(dtype))


def _dense_strides(tensor: Geometry) -> Sequence[int]:
    """Follow `infer_dense_strides()`: the strides of a copy in the same order."""
    order = iteration_order(tensor.sizes, [tensor.strides])
    return contiguous(tensor.sizes, tensor.dtype, order).strides


rule("sum", "mean")(_reduce_in_dtype_of_result)
rule("sum.dim_IntList", "mean.dim", "nansum")(partial(_reduce_in_dtype_of_result, dims=1, keepdim=2))
rule("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype")(
    partial(_reduce_in_dtype_of_result, dims=2, keepdim=3)
)


def _extremum(
    call: KernelCall, *, dims: int | None = None, keepdim: int | None = None, accumulator: int | None = None
) -> None:
    """Keep one value in each thread, by default in the dtype of the source."""
    call.allocate_results()
    source = call.tensor(0)
    _reduce(call, source, _Dims(call, dims, keepdim), source.element if accumulator is None else accumulator)


rule("max", "min")(_extremum)
rule("amax", "amin")(partial(_extremum, dims=1, keepdim=2))
rule("max.dim", "min.dim")(partial(_extremum, dims=1, keepdim=2, accumulator=PAIR))
rule("any", "all")(partial(_extremum, accumulator=1))
rule("any.dim", "all.dim", "any.dims", "all.dims")(partial(_extremum, dims=1, keepdim=2, accumulator=1))


@rule("argmax", "argmin")
def _index_of_extremum(call: KernelCall) -> None:
    source = call.tensor(0)
    if call.arguments[1] is not None or source.is_contiguous():
        _extremum(call, dims=1, keepdim=2, accumulator=PAIR)
        return
    call.allocate_results()
    call.copy(source)  # without a dimension, the tensor is reduced as a vector
    _reduce(call, contiguous([source.numel], source.dtype), _Dims(call), PAIR)


@rule("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _variance(call: KernelCall) -> None:
    # Welford's algorithm: mean, sum of squares, and two counts.
    call.allocate_results()
    source = call.tensor(0)
    _reduce(call, source, _Dims(call, 1, 3), 4 * accumulator_bytes(source.dtype), vector=2)


def _reduce_to_extrema(call: KernelCall, dims: _Dims) -> None:
    """Reduce to both extrema together: `aminmax_allreduce_kernel()`, which copies tensors that are not contiguous."""
    source = call.tensor(0)
    results = [contiguous([], source.dtype)] * len(call.results) if dims.dims is None else call.results
    reduce_on_gpu(call, source, results, dims.dims, keepdim=dims.keepdim, accumulator=2 * source.element)


@rule("aminmax")
def _extrema_together(call: KernelCall) -> None:
    call.allocate_results()
    _reduce_to_extrema(call, _Dims(call, 1, 2))


@rule("count_nonzero.dim_IntList")
def _count_nonzero(call: KernelCall) -> None:
    # `count_nonzero_cuda()`: a mask of nonzero elements, and their number.
    source = call.tensor(0)
    call.allocate(0 if source.dtype is torch.bool else source.numel)
    call.allocate_results(0)
    numbers = contiguous(source.sizes, torch.int64)
    call.copy(numbers)
    _reduce(call, numbers, _Dims(call, 1), numbers.element)


@rule("renorm")
def _renorm(call: KernelCall) -> None:
    # `renorm_out()` in Normalization.cpp: the norms, in float, and the factors computed from them.
    call.allocate_results()
    source, dim = call.tensor(0), call.arguments[2]
    if source.numel == 0:
        return
    count, number = source.sizes[dim], accumulator_bytes(source.dtype)
    call.allocate(count * number)
    result = contiguous([count], source.dtype)
    reduce_on_gpu(call, source, [result], source.dims_but(dim % source.dim), accumulator=number)
    if number != source.element:
        call.allocate(count * source.element)


@rule("histc")
def _histogram(call: KernelCall) -> None:
    # `_histc_cuda_template()` computes the bounds if they are not given.
    call.allocate_results()
    source, (least, most) = call.tensor(0), call.arguments[2:4]
    if source.numel > 0 and least == 0 and most == 0:
        smallest, largest = call.allocate(source.element), call.allocate(source.element)
        _reduce_to_extrema(call, _Dims(call))
        call.free(smallest, largest)


@rule("isin.Tensor_Tensor")
def _is_in(call: KernelCall) -> None:
    # `isin_default_kernel_gpu()`, for few test elements. More are sorted, and the memory depends on their values.
    call.allocate_results()
    count, wanted = call.tensor(0).numel, call.tensor(1).numel
    if wanted < 10.0 * float(count) ** 0.145:
        call.allocate(count * wanted)  # are equal
        call.allocate(count)  # are in


# ---- Normalization, softmax, dropout, recurrent cells, and norms of lists of tensors


DIMS_OF_IMAGES = 4  # may be channels last


rule("_softmax", "_log_softmax")(copying(after=[0]))  # `host_softmax()`
rule("_log_softmax_backward_data")(copying(after=[0, 1]))  # `host_softmax_backward()`
rule("native_layer_norm")(copying(before=[0]))  # `layer_norm_cuda()` in layer_norm_kernel.cu
rule("native_layer_norm_backward")(copying(before=[1], after=[0]))
rule("native_dropout", "_thnn_fused_gru_cell", "nll_loss2d_forward")(lambda call: call.allocate_results(1, 0))
rule("_thnn_fused_lstm_cell")(lambda call: call.allocate_results(2, 0, 1))


@rule("_softmax_backward_data")
def _softmax_backward(call: KernelCall) -> None:
    call.allocate_results()
    call.copy(call.tensor(0))  # the product of gradient and output, which is summed
    call.contiguous(call.tensor(0), call.tensor(1))


@rule("_safe_softmax")
def _safe_softmax(call: KernelCall) -> None:
    # `_safe_softmax()` in Attention.cpp of ATen/native/transformers: fully masked rows become zeros.
    source, dim = call.tensor(0), call.arguments[1]
    call.allocate_results()
    with call:
        call.contiguous(source)
    if source.dim == 0:
        return
    mask = Geometry(source.sizes, source.strides, torch.bool)
    rows = _with_ones(mask, [dim])
    call.copy(mask)
    call.copy(rows)
    reduce_on_gpu(call, mask, [rows], [dim], keepdim=True, accumulator=1)
    call.allocate(source.element)  # zero


def _with_ones(tensor: Geometry, dims: list[int]) -> Geometry:
    """Return the result of a reduction that keeps the dimensions."""
    sizes = list(tensor.sizes)
    for dim in dims:
        sizes[dim] = 1
    return contiguous(sizes, tensor.dtype)


@rule("logsumexp")
def _log_sum_exp(call: KernelCall) -> None:
    # `logsumexp_out_impl()`
    source, result, (dims, keepdim) = call.tensor(0), call.result(), call.arguments[1:3]
    if not source.dtype.is_floating_point or source.numel == 0 or source.dim == 0:
        return
    call.copy(result)  # the maxima
    reduce_on_gpu(call, source, [_with_ones(source, dims)], dims, keepdim=True, accumulator=source.element)
    with call:
        call.copy(result)  # the magnitudes
        call.allocate(result.numel)  # a mask of infinite ones
    call.copy(source)  # the exponentials
    call.allocate_results(0)
    reduce_on_gpu(call, source, [result], dims, keepdim=keepdim, accumulator=accumulator_bytes(source.dtype))


@rule("native_group_norm")
def _group_norm(call: KernelCall) -> None:
    # group_norm_kernel.cu
    source, weight, bias, samples, channels, positions, groups, _ = call.arguments
    memory_format, number = source.memory_format(), accumulator_bytes(source.dtype)
    call.copy_unless(source.is_contiguous(memory_format), source)
    call.allocate_results()
    if number != source.element:  # in half precision, mean and deviation are rounded at the end
        for _ in range(2):
            call.allocate(samples * groups * number)
    is_flat = positions == 1 and source.dim < DIMS_OF_IMAGES
    is_last = memory_format is not torch.contiguous_format
    if source.numel > 0 and not is_flat and (is_last or positions == 1 or weight is not None or bias is not None):
        for _ in range(2):  # a factor and a summand for each channel of each sample
            call.allocate(samples * channels * number)


@rule("native_group_norm_backward")
def _group_norm_backward(call: KernelCall) -> None:
    gradient, source, _, _, weight, samples, channels, positions, groups, wanted = call.arguments
    memory_format, number = source.memory_format(), accumulator_bytes(source.dtype)
    call.copy_unless(gradient.is_contiguous(memory_format), gradient)
    call.allocate_results()
    of_channels = samples * channels * number
    if positions != 1 or source.dim >= DIMS_OF_IMAGES:
        for _ in range(2):  # products and sums
            call.allocate(of_channels)
    if wanted[0]:
        of_groups = [call.allocate(samples * groups * number) for _ in range(2)]
        if positions != 1:
            has_factors = weight is not None and memory_format is torch.contiguous_format
            factors = call.allocate(of_channels if has_factors else 0)
            call.free(*reversed(of_groups), factors)


@rule("_foreach_norm.Scalar")
def _norms_of_list(call: KernelCall) -> None:
    # ForeachReduceOp.cu: each chunk is reduced to a number, and these to one number per tensor.
    tensors: list[Geometry] = call.arguments[0]
    call.allocate((len(tensors) + 1) * 8)  # offsets
    if tensors:
        call.allocate(sum(divide_up(tensor.numel, 65536) for tensor in tensors) * accumulator_bytes(tensors[0].dtype))
    call.allocate_results()


# ---- Batch normalization by PyTorch's native kernels: Normalization.cu in ATen/native/cuda


CHANNELS = 1  # the dimension


def _statistics_are_channels_last(tensor: Geometry) -> bool:
    """Return true if the channels-last kernels read the statistics: `batch_norm_choose_impl()`, in two dimensions."""
    if tensor.is_contiguous():
        return tensor.strides[CHANNELS] == 1
    return tensor.is_contiguous(torch.channels_last)


def _gradients_are_channels_last(tensor: Geometry) -> bool:
    """Return true if they read the gradients: `batch_norm_use_channels_last_kernels()`, also in three dimensions."""
    formats = (torch.channels_last, torch.channels_last_3d)
    return any(map(tensor.is_contiguous, formats)) or (tensor.is_contiguous() and tensor.strides[CHANNELS] == 1)


def _launch(tensor: Geometry) -> tuple[int, int]:
    """Follow `flexible_launch_configs()`: return the blocks along the channels and along the other dimensions."""
    threads, values_of_thread = 512, 16
    channels = tensor.sizes[CHANNELS]
    values = tensor.numel // channels
    width = min(last_power(channels), 32)
    height = min(last_power(divide_up(values, values_of_thread)), threads // width)
    if width * height != threads:
        width = min(last_power(channels), threads // height)
    blocks = min(divide_up(values, height * values_of_thread), 128)
    return divide_up(channels, width), 1 if blocks < 8 else blocks


def _meet_in_buffer(call: KernelCall, tensor: Geometry, count: int) -> None:
    """Allocate `count` numbers per block and channel, in which the blocks of the same channels meet, and counters."""
    of_channels, of_others = _launch(tensor)
    if of_others > 1:
        with call:
            call.allocate(count * tensor.sizes[CHANNELS] * of_others * accumulator_bytes(tensor.dtype))
            call.allocate(of_channels * 4)


def _mean_and_variance(call: KernelCall, source: Geometry) -> None:
    """Follow `var_mean()` over all dimensions but the channels, computed in float."""
    number = accumulator_bytes(source.dtype)
    if number != source.element:
        source = Geometry(source.sizes, source.strides, torch.float32)
        call.copy(source)
    mean = contiguous([source.sizes[CHANNELS]], source.dtype)
    reduce_on_gpu(call, source, [mean, mean], source.dims_but(CHANNELS), accumulator=4 * number, vector=2)


@rule("native_batch_norm")
def _batch_norm(call: KernelCall) -> None:
    source, trains = call.tensor(0), call.arguments[5]
    call.allocate_results()
    if source.numel > 0 and trains:
        if _statistics_are_channels_last(source):
            _meet_in_buffer(call, source, 4)
        elif not source.is_contiguous():
            _mean_and_variance(call, source)


def _copy_unless_flat(call: KernelCall, tensor: Geometry) -> None:
    """Copy for `batch_norm_backward_cuda_template()`, which reads [sample, channel, position]."""
    expected = None
    for dim in range(tensor.dim - 1, CHANNELS, -1):
        size, stride = tensor.sizes[dim], tensor.strides[dim]
        if size != 1:
            if expected is not None and stride != expected:
                call.copy(tensor)
                return
            expected = stride * size


@rule("native_batch_norm_backward")
def _batch_norm_backward(call: KernelCall) -> None:
    gradient, source = call.tensor(0), call.tensor(1)
    trains, wanted = call.arguments[7], call.arguments[9]
    if source.numel == 0 or not wanted[0] or not (trains or wanted[1] or wanted[2]):
        return
    if not _gradients_are_channels_last(source):
        _copy_unless_flat(call, source)
        _copy_unless_flat(call, gradient)
        call.allocate_results()
        return
    number = accumulator_bytes(source.dtype)
    for _ in range(2):  # sums and products
        call.allocate(source.sizes[CHANNELS] * number)
    for result in (1, 2):
        if wanted[result]:
            call.allocate_results(result)
    if _gradients_are_channels_last(gradient):
        _meet_in_buffer(call, source, 2)
    is_last = _statistics_are_channels_last(source) and _statistics_are_channels_last(gradient)
    if not is_last and call.arguments[2] is None:  # the kernel for all layouts requires a weight
        call.allocate(number)
    call.allocate_results(0)
