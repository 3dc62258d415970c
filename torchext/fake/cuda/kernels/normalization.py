"""Normalization, softmax, dropout, recurrent cells, and norms of lists of tensors."""

from __future__ import annotations

import torch

from .buffers import accumulator_bytes, reduce_on_gpu
from .calls import KernelCall, copying, rule
from .geometry import Geometry, contiguous, divide_up, last_power

__all__: list[str] = []

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
