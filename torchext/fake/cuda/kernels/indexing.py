"""Writes and additions by index: Indexing.cu, TensorAdvancedIndexing.cpp, TensorTransformations.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch

from .buffers import radix_sort_bytes, reduce_on_gpu, scan_bytes
from .calls import NO_BLOCK, KernelCall, rule
from .geometry import Geometry, broadcast, contiguous, count_bits

__all__: list[str] = []

INDEX = 8  # bytes


class _Indices:
    """The indices of a call, at most one per dimension, expanded to the same sizes."""

    def __init__(self, tensors: Sequence[Geometry | None]) -> None:
        given = [tensor for tensor in tensors if tensor is not None]
        self.indexed = {dim for dim, tensor in enumerate(tensors) if tensor is not None}
        # A mask stands for one index per dimension of the mask. Their number depends on its values.
        self.has_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given)
        sizes: Sequence[int] = [] if self.has_mask else reduce(broadcast, [tensor.sizes for tensor in given], [])
        self.count = prod(sizes)
        self.given = given if self.has_mask else [_expanded(tensor, sizes) for tensor in given]

    def are_adjacent(self, num_dims: int) -> bool:
        """Follow `hasContiguousSubspace()`: return true if the indexed dimensions are adjacent."""
        changes = sum((dim in self.indexed) != (dim - 1 in self.indexed) for dim in range(1, num_dims))
        return changes < 2 or (changes == 2 and 0 not in self.indexed)


def _expanded(index: Geometry, sizes: Sequence[int]) -> Geometry:
    """Return an index of `int64` that is expanded to `sizes`: `inferExpandGeometry()`."""
    strides = [0] * len(sizes)
    for i in range(len(sizes) - 1, -1, -1):
        dim = i - len(sizes) + index.dim
        if dim >= 0:
            strides[i] = index.strides[dim] if index.sizes[dim] == sizes[i] else 0
        elif index.dim and sizes[i] == 1:
            strides[i] = sizes[i + 1] * strides[i + 1]
    return Geometry(sizes, strides, torch.int64)


def _check_bounds(call: KernelCall, index: Geometry) -> None:
    """Follow `wrapIndexOnce()`: check that all indices are in bounds, unless that is known."""
    smallest, largest = call.allocate(INDEX), call.allocate(INDEX)
    with call:
        call.contiguous(index)
    result = contiguous([], torch.int64)
    reduce_on_gpu(call, contiguous([index.numel], torch.int64), [result, result], accumulator=2 * INDEX)
    call.allocate_and_free(1)
    call.allocate_and_free(1)
    call.free(smallest, largest)


def _allocate_linear_index(call: KernelCall, indices: _Indices, is_checked: bool) -> None:
    """Follow `computeLinearIndex()`: the positions in the tensor, as if it had one dimension."""
    linear = NO_BLOCK
    for index in indices.given:
        if is_checked:
            _check_bounds(call, index)
        wrapped, scaled = call.copy(index), call.copy(index)
        call.free(wrapped)
        if linear == NO_BLOCK:
            linear = scaled
        else:
            call.free(scaled)


def _add_by_sorted_index(call: KernelCall, indices: _Indices, values: Geometry, is_checked: bool) -> None:
    """Follow `index_put_with_sort_kernel()`."""
    source, count = call.tensor(0), indices.count
    call.contiguous(source)
    are_adjacent = indices.are_adjacent(source.dim)
    # The contiguous elements of an index are those behind the indexed dimensions. Other dimensions are moved to the end
    # unless the indexed ones are adjacent.
    begin = min(indices.indexed, default=source.dim) if are_adjacent else 0
    remaining = [1 if dim in indices.indexed else size for dim, size in enumerate(source.sizes)]
    elements, slice_size = prod(remaining), prod(remaining[begin:])
    _allocate_linear_index(call, indices, is_checked)
    if values.numel != count * elements or not values.is_contiguous():
        call.allocate(count * elements * source.element)
    call.copy_unless(are_adjacent, source)
    for _ in range(3):  # the sorted indices, the original positions, and a range
        call.allocate(count * INDEX)
    call.allocate(radix_sort_bytes(count, INDEX, INDEX, count_bits((source.numel - 1) // slice_size)))


def _copy_indices(call: KernelCall, indices: _Indices) -> list[int]:
    """Copy indices for `AdvancedIndex`, whose kernel requires that all have the same strides."""
    given = indices.given
    are_same = all(index.strides == given[0].strides for index in given)
    return [call.copy_unless(are_same or index.is_contiguous(), index) for index in given]


@rule("index.Tensor")
def _index(call: KernelCall) -> None:
    indices = _Indices(call.arguments[1])
    if not indices.has_mask:
        _copy_indices(call, indices)
        call.allocate_results()


@rule("index_put", "index_put_", "_index_put_impl_")
def _index_put(call: KernelCall) -> None:
    source, tensors, values, accumulates, *is_unsafe = call.arguments
    indices = _Indices(tensors)
    call.allocate_results()
    if indices.has_mask or source.numel == 0 or indices.count == 0:
        return
    if accumulates:
        _add_by_sorted_index(call, indices, values, is_checked=not any(is_unsafe))
    else:
        call.free(*_copy_indices(call, indices))


def _is_mean(call: KernelCall) -> bool:
    """Return true for a mean, which needs the number of values."""
    reduction: str = call.arguments[4]
    return reduction == "mean"


@rule("scatter_reduce.two", "scatter_reduce_.two")
def _scatter_reduce(call: KernelCall) -> None:
    # `scatter_reduce_two()`: a one for each value, the counts, and a mask of counts that are zero.
    call.allocate_results()
    if _is_mean(call):
        call.copy(call.tensor(3))
        call.copy(call.tensor(0))
        call.allocate(call.tensor(0).numel)


@rule("index_reduce", "index_reduce_")
def _index_reduce(call: KernelCall) -> None:
    # `index_reduce_func_cuda_impl()`
    call.allocate_results()
    if _is_mean(call):
        call.copy(call.tensor(0))  # the counts
        call.allocate_and_free(call.tensor(3).nbytes)
        call.allocate_and_free(call.tensor(0).numel)


@rule("masked_scatter_")
def _masked_scatter(call: KernelCall) -> None:
    # `masked_scatter_cuda_impl()`
    source, mask = call.tensor(0), call.tensor(1)
    if source.numel == 0:
        return
    call.allocate(source.numel * INDEX)  # the numbers of masked elements before each element
    if mask.numel != source.numel or not mask.is_contiguous():
        call.allocate(source.numel)
    call.allocate(scan_bytes(source.numel, INDEX))


@rule("roll")
def _roll(call: KernelCall) -> None:
    # `roll_common()`: one dimension at a time.
    source, count = call.tensor(0), len(call.arguments[1])
    if source.numel == 0 or count == 0:
        return
    copy = call.copy_unless(source.is_contiguous(), source)
    if count > 1:
        call.copy(source)
        call.free(copy)
    for _ in range(count - 2):
        call.copy(source)
    call.allocate_results(0)
