"""Memory of sorts, scans, and kernels that use them: embeddings, sums by index, and writes by index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import prod

import torch

from .buffers import (
    accumulator_bytes,
    radix_sort_bytes,
    reduce_on_gpu,
    scan_by_key_bytes,
    scan_bytes,
    segmented_sort_bytes,
    unique_by_key_bytes,
)
from .calls import NO_BLOCK, Geometry, KernelCall, broadcast, contiguous, copying, count_bits, divide_up, rule

__all__: list[str] = []

LONG = 8  # bytes, also those of an index


def _slice_size(tensor: Geometry, dim: int) -> int:
    return tensor.sizes[dim] if tensor.dim else 1


def _has_compact_slices(tensor: Geometry, dim: int) -> bool:
    """Return true if the elements of each slice are contiguous, without gaps."""
    return tensor.dim == 0 or (tensor.is_dense() and tensor.strides[dim] == 1)


def _sort_compact_slices(call: KernelCall, source: Geometry, dim: int) -> None:
    """Follow `launch_stable_sort_kernel()`."""
    count, key = source.numel, source.element
    slices = count // _slice_size(source, dim)
    radix = radix_sort_bytes(count, key, LONG, 8 if source.dtype is torch.bool else key * 8)
    with call:
        call.allocate(count * LONG)  # indices
        if slices == 1:
            call.allocate(radix)
        elif slices >= 128:
            call.allocate(segmented_sort_bytes(count, key, LONG))
        else:  # `segmented_sort_pairs_by_full_sort()`: sorts all elements together, then by slice.
            call.allocate(count * LONG)
            with call:
                call.allocate(count * key)
                call.allocate(radix)
            call.allocate(radix_sort_bytes(count, LONG, 0, count_bits(slices)))


def _sort_slices(call: KernelCall, source: Geometry, dim: int) -> None:
    """Add the allocations of a sort after its results: `sort_cuda_kernel()`.

    Slices of up to 4096 elements are sorted in place (`sortKeyValueInplace()`); larger ones in a copy, unless their
    elements are contiguous.
    """
    if source.numel == 0:
        return
    with call:
        if _slice_size(source, dim) <= 4096:
            call.allocate(_slice_size(source, dim) * LONG)
            return
        if not _has_compact_slices(source, dim):
            call.copy(source)
            if not _has_compact_slices(call.result(), dim):  # values and indices are sorted beside the results
                call.copy(source)
                call.allocate(source.numel * LONG)
        _sort_compact_slices(call, source, dim)


def _sort(call: KernelCall, *, dim: int) -> None:
    """Sort along the dimension that the argument number `dim` names."""
    call.allocate_results()
    _sort_slices(call, call.tensor(0), call.arguments[dim])


rule("sort")(partial(_sort, dim=1))
rule("sort.stable")(partial(_sort, dim=2))
rule("kthvalue")(copying(before=[0]))
rule("cummax", "cummin")(copying(after=[0]))


@rule("median")
def _median_of_all(call: KernelCall) -> None:
    # `median_impl()` sorts all elements and checks whether the last is NaN.
    source = call.tensor(0)
    if source.numel > 0:
        call.contiguous(source)
        call.copy(source)  # sorted
        indices = call.allocate(source.numel * LONG)
        _sort_slices(call, contiguous([source.numel], source.dtype), 0)
        call.free(indices)
        call.allocate(1)
        call.allocate_results(0)


@rule("mode")
def _mode(call: KernelCall) -> None:
    # `mode_kernel_impl()` moves the dimension to the end.
    call.allocate_results()
    source = call.tensor(0)
    if source.dim > 0:
        call.contiguous(source.transpose(call.arguments[1], -1))


def _search(call: KernelCall, *, values: int, boundaries: int) -> None:
    """Follow `searchsorted_maybe_trim_input_tensors()`. `values` and `boundaries` are the indices of the arguments."""
    call.allocate_results()
    tensors = call.tensor(values), call.tensor(boundaries)
    common = _promoted(tensors[0].dtype, tensors[1].dtype)
    call.contiguous(*tensors)
    for tensor in tensors:
        if tensor.dtype is not common:
            call.allocate(tensor.numel * common.itemsize)


rule("bucketize.Tensor")(partial(_search, values=0, boundaries=1))
rule("searchsorted.Tensor")(partial(_search, values=1, boundaries=0))


def _promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Follow `promoteTypes()`, hidden from modes. Raises its error for dtypes that have no common one."""
    with torch._C.DisableTorchFunction():
        return torch.promote_types(first, second)


@rule("cumsum", "cumprod", "_logcumsumexp")
def _cumulate(call: KernelCall) -> None:
    # CUB scans vectors only: `scan_dim()` in ScanUtils.cuh. Sums of integers are computed in 8 bytes.
    call.allocate_results()
    source, result = call.tensor(0), call.result()
    if source.numel == 0 or source.dim == 0:
        return
    if source.dtype is result.dtype:
        call.contiguous(source)
    else:
        call.copy(result)
    if source.numel == _slice_size(source, call.arguments[1]):
        call.allocate(scan_bytes(source.numel, result.element))


# The sizes from which `should_use_multiblock()` in TensorTopK.cu is true, for up to a number of slices.
MANY_BLOCKS = [(20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800)]


@rule("topk")
def _topk(call: KernelCall) -> None:
    call.allocate_results()
    source = call.tensor(0)
    if source.numel == 0 or source.dim == 0:
        return
    call.contiguous(source)
    size, element = _slice_size(source, call.arguments[2]), source.element
    slices = source.numel // size
    if size < next((least for limit, least in MANY_BLOCKS if slices <= limit), 400):
        return
    threads, digits = 256, 256
    resident_blocks = call.gpu.multiprocessors * 6  # 65536 registers per multiprocessor, 40 per thread
    items = min(max(divide_up(source.numel, resident_blocks * threads), 4), 64)
    blocks = slices * divide_up(size, items * threads)
    for nbytes in (slices * element, slices * 8, slices * 2 * max(element, 4)):
        call.allocate(nbytes)
    for nbytes in (blocks * digits * 2, slices * digits * 4, blocks * 4, blocks * 4):
        call.allocate(nbytes)
    for _ in range(2):
        call.allocate_and_free(scan_bytes(blocks, LONG))


def _sort_indices(call: KernelCall, indices: Geometry, largest: int) -> None:
    """Sort indices to sum the gradients of equal rows."""
    for _ in range(2):  # the sorted and the original ones
        call.copy(indices)
    with call:
        call.copy(indices)  # a range
        call.allocate(radix_sort_bytes(indices.numel, indices.element, indices.element, count_bits(largest)))


def _count_indices(call: KernelCall, indices: Geometry) -> None:
    """Count the occurrences of each index: scan upwards and spread downwards."""
    call.copy(indices)
    for _ in range(2):
        call.allocate_and_free(scan_by_key_bytes(indices.numel))


def _add_up_rows(call: KernelCall, rows: int, by_frequency: bool) -> None:
    """Follow `embedding_backward_cuda_kernel()`: sum rows in segments of up to 10, and then those of each row."""
    gradient, indices = call.tensor(0), call.tensor(1)
    count, element = indices.numel, indices.element
    _sort_indices(call, indices, rows)
    if by_frequency:
        _count_indices(call, indices)
    call.allocate_results()
    call.copy(indices)  # offsets
    call.allocate(LONG)  # the number of segments
    with call:
        call.copy(indices)  # unique
        call.allocate(unique_by_key_bytes(count))
    segments = min(count, rows)
    for _ in range(2):  # the numbers of their parts, and offsets of these
        call.allocate(segments * element)
    call.allocate_and_free(scan_bytes(segments, element))
    call.allocate(LONG)  # the number of all parts
    parts = count // 10 + segments
    call.allocate(parts * element)
    call.allocate(parts * gradient.sizes[-1] * accumulator_bytes(gradient.dtype))


@rule("embedding_dense_backward")
def _embedding_backward(call: KernelCall) -> None:
    gradient, indices, rows, _, by_frequency = call.arguments
    call.contiguous(gradient)
    if indices.numel > 3072 or by_frequency:
        _add_up_rows(call, rows, by_frequency)
    else:
        call.contiguous(indices)
        call.allocate_results()


def _embedding_bag_backward(call: KernelCall, *, rows: int) -> None:
    """Sum the gradients of rows. `rows` is the index of the number of rows among the arguments."""
    num_rows, by_frequency, mode = call.arguments[rows : rows + 3]
    call.contiguous(call.tensor(0))
    if mode == 2:  # a maximum is summed by atomic operations
        call.allocate_results()
    else:
        _add_up_rows(call, num_rows, by_frequency)


rule("_embedding_bag")(lambda call: call.allocate_results(2, 1))
rule("_embedding_bag_backward")(partial(_embedding_bag_backward, rows=6))
rule("_embedding_bag_dense_backward")(partial(_embedding_bag_backward, rows=5))


# ---- Writes and additions by index: Indexing.cu, TensorAdvancedIndexing.cpp, TensorTransformations.cu


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
    smallest, largest = call.allocate(LONG), call.allocate(LONG)
    with call:
        call.contiguous(index)
    result = contiguous([], torch.int64)
    reduce_on_gpu(call, contiguous([index.numel], torch.int64), [result, result], accumulator=2 * LONG)
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
        call.allocate(count * LONG)
    call.allocate(radix_sort_bytes(count, LONG, LONG, count_bits((source.numel - 1) // slice_size)))


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
    call.allocate(source.numel * LONG)  # the numbers of masked elements before each element
    if mask.numel != source.numel or not mask.is_contiguous():
        call.allocate(source.numel)
    call.allocate(scan_bytes(source.numel, LONG))


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
