"""The calls whose kernel allocations record_kernels.py records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from oracle.convolution_calls import convolution_calls
from oracle.fused_calls import fused_calls
from oracle.image_calls import image_calls
from oracle.indexing_calls import indexing_calls
from oracle.recording import Call, aten, make
from torch import Tensor

__all__ = ["calls"]

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
REDUCED = [(1 << 20,), (100003,), (2048, 1024), (1024, 2049), (100003, 3), (3, 100003), (8, 300, 512), (4, 96, 40, 40)]


def calls() -> Iterator[Call]:
    """Yield all calls. Tensors are made immediately before their call."""
    yield from products()
    yield from reductions()
    yield from fused_calls()
    yield from convolution_calls()
    yield from image_calls()
    yield from indexing_calls()


def products() -> Iterator[Call]:
    """Yield products of matrices, of all layouts that are copied and some that are not."""
    for dtype, (m, k, n) in itertools.product(FLOATS, ((64, 96, 32), (1, 64, 32), (64, 1, 32), (64, 32, 1))):
        a, b, bias = make(m, k, dtype=dtype), make(k, n, dtype=dtype), make(n, dtype=dtype)
        wide = make(m, 2 * k, dtype=dtype)
        matrices = [a, make(k, m, dtype=dtype).t(), wide[:, ::2], wide[:, :k], bias[:1].expand(m, k)]
        for matrix in matrices:
            yield aten.mm.default, (matrix, b)
            yield aten.addmm.default, (bias, matrix, b, 1, 1)
            yield aten.mv.default, (matrix, b[:, 0])
            batches = matrix.expand(3, m, k)
            yield aten.bmm.default, (batches, b.expand(3, k, n))
        yield aten.mm.default, (a, make(n, k, dtype=dtype).t())
        yield aten.mm.default, (a, bias[:1].expand(k, n))
        yield aten.addmm_.default, (make(n, m, dtype=dtype).t(), a, b, 1, 1)
        yield aten.baddbmm.default, (make(2, m, n, dtype=dtype), make(2, m, k, dtype=dtype), b.expand(2, k, n), 1, 1)
        yield (
            aten.bmm.default,
            (make(m, 2, k, dtype=dtype).transpose(0, 1), make(n, k, 2, dtype=dtype).permute(2, 1, 0)),
        )
    yield aten.mm.default, (make(0, 3), make(3, 4))
    yield aten.mm.default, (make(3, 0), make(0, 4))
    yield aten.bmm.default, (make(2, 3, 0), make(2, 0, 4))
    yield aten.dot.default, (make(7), make(7))


def reductions() -> Iterator[Call]:
    """Reductions, over each dimension and several, with and without their dimensions kept."""
    for sizes, dtype in itertools.product(REDUCED, (*FLOATS, torch.float16, torch.int64, torch.bool)):
        x = make(*sizes, dtype=dtype)
        yield from full_reductions(x)
        for dims in ([0], [1], [2], [0, 1], [1, 2], [0, 2, 3]):
            if max(dims) < x.dim():
                yield from partial_reductions(x, dims)
    x = make(2048, 1024)
    for view in (x.t(), x[:, ::2], x[:, 1:], x[:1].expand(2048, 1024)):
        yield aten.sum.dim_IntList, (view, [0], False, None)
        yield aten.sum.dim_IntList, (view, [1], True, None)
        yield aten.sum.default, (view, None)
    images = make(4, 96, 40, 40).to(memory_format=torch.channels_last)
    for dims in ([0, 2, 3], [2, 3], [1]):
        yield aten.sum.dim_IntList, (images, dims, True, None)


def full_reductions(x: Tensor) -> Iterator[Call]:
    """Reductions of all elements."""
    yield aten.sum.default, (x, None)
    yield aten.max.default, (x,)
    yield aten.any.default, (x,)
    if x.is_floating_point():
        yield aten.mean.default, (x, None)
        yield aten.linalg_vector_norm.default, (x, 2, None, False, None)
        yield aten.linalg_vector_norm.default, (x, float("inf"), None, False, None)
        yield aten.var.correction, (x, None, None, False)
    if x.dtype == torch.bfloat16:
        yield aten.sum.default, (x, torch.float32)
        yield aten.linalg_vector_norm.default, (x, 2, None, False, torch.float32)


def partial_reductions(x: Tensor, dims: list[int]) -> Iterator[Call]:
    """Reductions over `dims`."""
    yield aten.sum.dim_IntList, (x, dims, False, None)
    yield aten.amax.default, (x, dims, True)
    if x.is_floating_point():
        yield aten.mean.dim, (x, dims, True, None)
        yield aten.var_mean.correction, (x, dims, None, False)
        yield aten.linalg_vector_norm.default, (x, 2, dims, False, None)
    if len(dims) == 1 and x.dtype != torch.bool:
        yield aten.argmax.default, (x, dims[0], False)
        yield aten.max.dim, (x, dims[0], True)
