"""Reductions: the Reduce*Kernel.cu in ATen/native/cuda, and ReduceOps.cpp, which calls them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .buffers import accumulator_bytes, reduce_on_gpu
from .calls import KernelCall, rule
from .geometry import Geometry, contiguous, is_reduced, iteration_order

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
