"""Batch normalization by PyTorch's native kernels: Normalization.cu in ATen/native/cuda."""

from __future__ import annotations

import torch

from .calls import KernelCall, rule
from .geometry import Geometry, contiguous, divide_up, last_power
from .reduction_buffers import accumulator_bytes, reduce_on_gpu

__all__: list[str] = []

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
