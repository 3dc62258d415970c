"""More calls for record_kernels.py: indices, sorted dimensions, scans, and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from oracle.recording import Call, aten, make
from torch import Tensor

__all__ = ["indexing_calls"]

FLOATS = (torch.float32, torch.bfloat16)
LARGEST_MODE = 2048  # larger ones depend on values


def indices(*sizes: int) -> Tensor:
    """Return indices on the device."""
    return make(*sizes, dtype=torch.int64)


def indexing_calls() -> Iterator[Call]:
    """Yield all calls."""
    yield from index_puts()
    yield from scatters()
    yield from dimensions()
    yield from medians()
    yield from searches()
    yield from random_numbers()
    yield from distances()
    yield from bags()


def index_puts() -> Iterator[Call]:
    """Yield index_put with accumulation."""
    for dtype, count in itertools.product(FLOATS, (500, 5000)):
        x, i = make(300, 20, 300, dtype=dtype), indices(count)
        places: list[tuple[list[Tensor | None], Tensor]] = [
            ([i], make(count, 20, 300, dtype=dtype)),
            ([None, i], make(300, count, 300, dtype=dtype)[:3]),
            ([i, i], make(count, 300, dtype=dtype)),
            ([i, None, i], make(count, 20, dtype=dtype)),
            ([i[:, None], indices(1, 4)], make(count, 4, 300, dtype=dtype)),
            ([i, i, i], make(1, dtype=dtype)),
        ]
        for where, values in places[: 6 if count == 500 else 4]:
            wide = values if where[0] is not None else make(1, dtype=dtype)
            yield aten._index_put_impl_.default, (x, where, wide, True, True)
            yield aten.index_put.default, (x, where, wide, True)
            yield aten.index_put_.default, (x, where, wide, False)
        for where, _ in places[:-1]:
            yield aten.index.Tensor, (x, where)
        if count == 500:
            for n in (2304, 2305):
                yield aten._index_put_impl_.default, (x, [indices(n)], make(1, dtype=dtype), True, True)
        yield aten._index_put_impl_.default, (x.transpose(0, 1), [i], make(1, dtype=dtype), True, True)


def scatters() -> Iterator[Call]:
    """Yield means by index, masked elements, and maxima."""
    for dtype in FLOATS:
        x, i, values = make(300, 1000, dtype=dtype), indices(300, 50), make(300, 50, dtype=dtype)
        for reduce, includes in itertools.product(("sum", "mean", "prod", "amax"), (True, False)):
            yield aten.scatter_reduce.two, (x, 1, i, values, reduce, includes)
            if reduce != "sum":
                yield aten.index_reduce.default, (x, 0, indices(50), make(50, 1000, dtype=dtype), reduce, includes)
        yield aten.masked_scatter_.default, (x, make(300, 1000, dtype=torch.bool), x)
        yield aten.masked_scatter_.default, (x, make(300, 1, dtype=torch.bool), x)


def dimensions() -> Iterator[Call]:
    """Yield sorts, scans and rolls along a dimension whose elements are not adjacent."""
    for dtype in FLOATS:
        for x in (make(9000, 20, dtype=dtype), make(1000, 300, dtype=dtype), make(300, 1000, dtype=dtype).t()):
            yield aten.sort.default, (x, 0, False)
            yield aten.sort.stable, (x, True, 0, True)
            yield aten.topk.default, (x, 3, 0, True, True)
            yield aten.cummax.default, (x, 0)
            if len(x) < LARGEST_MODE:
                yield aten.mode.default, (x, 0, False)
            yield aten.kthvalue.default, (x, 3, 0, False)
            yield aten.roll.default, (x, [3, 2], [0, 1])
            yield aten.roll.default, (x, [3], [1])
            yield aten.cumsum.default, (x, 0, None)
        for x in (make(30000, dtype=dtype), make(300, 1000, dtype=dtype), make(1000, 300, dtype=dtype).t()):
            yield aten._logcumsumexp.default, (x, 0)
            if x.shape[-1] < LARGEST_MODE:
                yield aten.mode.default, (x, -1, False)
        yield aten.unfold_backward.default, (make(30, 499, 4, dtype=dtype), [30, 1000], 1, 4, 2)
        yield aten.unfold_backward.default, (make(30, 30, 6, dtype=dtype), [30, 185], 1, 6, 6)


def medians() -> Iterator[Call]:
    """Yield medians of all elements."""
    for dtype, sizes in itertools.product(FLOATS, ((30000,), (300, 1000), (4, 50257))):
        yield aten.median.default, (make(*sizes, dtype=dtype),)
        yield aten.median.dim, (make(*sizes, dtype=dtype), -1, False)


def searches() -> Iterator[Call]:
    """Yield searches in sorted tensors, and counts."""
    x, boundaries = make(300, 1000), make(10)
    for values in (x, x.t(), make(3, dtype=torch.float64)):
        yield aten.bucketize.Tensor, (values, boundaries, False, False)
        yield aten.searchsorted.Tensor, (boundaries, values, False, False, None, None)
    yield aten.histc.default, (x, 100, 0.0, 0.0)
    yield aten.histc.default, (x, 100, 0.0, 1.0)
    yield aten.isin.Tensor_Tensor, (indices(3000), indices(5), False, False)
    for dtype, dim in itertools.product(FLOATS, (None, 0, 1)):
        yield aten.aminmax.default, (make(300, 5000, dtype=dtype), dim, False)
        if dim is not None:
            yield aten.count_nonzero.dim_IntList, (make(300, 1000, dtype=dtype), [dim])
            yield aten.renorm.default, (make(300, 100, dtype=dtype), 2, dim, 1.0)


def random_numbers() -> Iterator[Call]:
    """Yield permutations and samples. A block of threads sorts up to 2304 elements."""
    for n in (100, 2304, 2305, 20000, 50000):
        yield aten.randperm.generator_out, (n, None, indices(n))
    for sizes, count, replaces in (((30, 1000), 1, False), ((30, 1000), 5, False), ((1000,), 5, True)):
        yield aten.multinomial.default, (make(*sizes), count, replaces, None)
    for x in (make(300, 1000), make(300, 1000, dtype=torch.bfloat16)):
        yield aten.normal.Tensor_float, (x, 1.0, None)
        yield aten.bernoulli_.Tensor, (x, x, None)


def distances() -> Iterator[Call]:
    """Yield distances of all pairs."""
    for a in (make(8, 30, 20), make(8, 20, 30).transpose(1, 2)):
        b = make(8, 10, 20)
        yield aten._cdist_forward.default, (a, b, 1.0, None)
        y = aten._cdist_forward(a, b, 1.0, None)
        yield aten._cdist_backward.default, (y, a, b, 1.0, y)
        yield aten._cdist_backward.default, (y.transpose(1, 2).contiguous(), b, a, 1.0, y.transpose(1, 2).contiguous())
    points = make(100, 20)
    yield aten._pdist_backward.default, (make(4950), points, 2.0, make(4950))


def bags() -> Iterator[Call]:
    """Yield gradients of embedding bags."""
    for count in (500, 5000):
        i, offsets = indices(count), torch.arange(0, count, 10, device="cuda")
        for mode, by_frequency in ((0, True), (1, False), (2, False)):
            forward = (make(1000, 64), i, offsets, by_frequency, mode, False, None, False, -1)
            _, bag, size, largest = aten._embedding_bag(*forward)
            gradient = make(len(offsets), 64)
            of_all = (1000, by_frequency, mode, None, -1)
            yield aten._embedding_bag_dense_backward.default, (gradient, i, bag, size, largest, *of_all)
