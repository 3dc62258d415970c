"""More calls for record_kernels.py: convolutions by PyTorch's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from oracle.recording import Call, aten, make
from torch import Tensor

__all__ = ["convolution_calls"]

CHANNELS = 16  # of the output
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def geometry(
    dims: int, stride: int, padding: int, dilation: int, *, groups: int, transposed: bool = False
) -> tuple[Any, ...]:
    """Return the arguments of a convolution after its tensors."""
    return ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)


def convolution_calls() -> Iterator[Call]:
    """Yield all calls."""
    yield from kinds()
    yield from layouts()
    yield from large()
    yield from single()


def pair(x: Tensor, weight: Tensor, bias: Tensor | None, of_geometry: tuple[Any, ...]) -> Iterator[Call]:
    """Yield a convolution and its gradients, some of them not requested."""
    yield aten.convolution.default, (x, weight, bias, *of_geometry)
    gradient = aten.convolution(x, weight, bias, *of_geometry)
    for_bias = None if bias is None else [bias.numel()]
    for wanted in ([True, True, True], [False, True, True], [True, False, False]):
        mask = [*wanted[:2], wanted[2] and bias is not None]
        yield aten.convolution_backward.default, (gradient, x, weight, for_bias, *of_geometry, mask)


def weight_of(dims: int, groups: int, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """Return the weight for 8 input channels."""
    outer, inner = (8, CHANNELS) if transposed else (CHANNELS, 8)
    return make(outer, inner // groups, *[3] * dims, dtype=dtype)


def kinds() -> Iterator[Call]:
    """Yield convolutions in all dimensions, with groups and dilation, forward and transposed."""
    for dims, groups, dilation, transposed in itertools.product((1, 2, 3), (1, 2, 8), (1, 2), (False, True)):
        x = make(2, 8, *[(20, 9, 7)[dims - 1]] * dims)
        weight = weight_of(dims, groups, torch.float32, transposed=transposed)
        of_geometry = geometry(dims, 2, 1, dilation, groups=groups, transposed=transposed)
        for bias in (make(CHANNELS), None):
            yield from pair(x, weight, bias, of_geometry)


def layouts() -> Iterator[Call]:
    """Yield channels-last tensors, and others that are copied."""
    for dims, groups, dtype, transposed in itertools.product(
        (2, 3), (1, 2, 8), (torch.float32, torch.bfloat16), (False, True)
    ):
        x = make(2, 8, *[9] * dims, dtype=dtype).to(memory_format=LAST[dims])
        weight = weight_of(dims, groups, dtype, transposed=transposed).to(memory_format=LAST[dims])
        of_geometry = geometry(dims, 1, 1, 1, groups=groups, transposed=transposed)
        yield aten.convolution.default, (x, weight, make(CHANNELS, dtype=dtype), *of_geometry)
        gradient = aten.convolution(x, weight, None, *of_geometry).to(memory_format=LAST[dims])
        yield aten.convolution_backward.default, (gradient, x, weight, [CHANNELS], *of_geometry, [True] * 3)
    sequence = make(2, 30, 8).transpose(1, 2)
    for groups in (1, 2, 8):
        weight, of_geometry = make(CHANNELS, 8 // groups, 3), geometry(1, 1, 1, 1, groups=groups)
        yield aten.convolution.default, (sequence, weight, None, *of_geometry)
        for gradient in (make(2, 30, CHANNELS).transpose(1, 2), make(1, 1, 1).expand(2, CHANNELS, 30)):
            yield aten.convolution_backward.default, (gradient, sequence, weight, [CHANNELS], *of_geometry, [True] * 3)


def large() -> Iterator[Call]:
    """Yield gradients whose bias is summed in more than one block."""
    for sizes, groups, dilation, transposed in (
        ((4, 8, 200, 200), 1, 1, False),
        ((4, 8, 200, 200), 8, 1, False),
        ((2, 8, 300, 300), 1, 2, False),
        ((2, 8, 200, 200), 1, 1, True),
        ((2, 8, 40, 40, 40), 1, 1, False),
        ((2, 8, 40, 40, 40), 8, 1, False),
        ((2, 8, 30, 30, 30), 2, 1, True),
    ):
        dims = len(sizes) - 2
        weight = weight_of(dims, groups, torch.float32, transposed=transposed)
        of_geometry = geometry(dims, 1, 1, dilation, groups=groups, transposed=transposed)
        yield from pair(make(*sizes), weight, make(CHANNELS), of_geometry)


def single() -> Iterator[Call]:
    """Yield kernels of one element, and batches of one sample."""
    for dims, groups, transposed in itertools.product((1, 2, 3), (1, 2), (False, True)):
        weight = weight_of(dims, groups, torch.float32, transposed=transposed)
        point = make(*weight.shape[:2], *[1] * dims)
        of_geometry = geometry(dims, 1, 0, 1, groups=groups, transposed=transposed)
        yield from pair(make(2, 8, *[9] * dims), point, make(CHANNELS), of_geometry)
        yield from pair(make(1, 8, *[9] * dims), weight, make(CHANNELS), of_geometry)
