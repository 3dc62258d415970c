"""The temporary buffers of reductions (`gpu_reduce_kernel()` in Reduce.cuh), CUB's algorithms and random samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import ceil, log, log2, prod

import torch

from .calls import (
    Geometry,
    Gpu,
    KernelCall,
    broadcast,
    contiguous,
    divide_up,
    is_reduced,
    iteration_order,
    last_power,
    rule,
)

__all__ = [
    "accumulator_bytes",
    "radix_sort_bytes",
    "reduce_on_gpu",
    "scan_by_key_bytes",
    "scan_bytes",
    "segmented_sort_bytes",
    "unique_by_key_bytes",
]

MAX_INT32 = 2**31 - 1
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256  # per thread


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the size of a number in `acc_type` of a dtype."""
    return dtype.itemsize * (2 if is_reduced(dtype) or dtype is torch.complex32 else 1)


def reduce_on_gpu(
    call: KernelCall,
    source: Geometry,
    results: Sequence[Geometry],
    dims: Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    accumulator: int,
    vector: int = 4,
) -> None:
    """Add the allocations and frees of a reduction.

    If several thread blocks reduce to the same result, the kernel allocates a buffer for their partial results, and
    counters of the blocks that are done.

    Args:
        call: The call of the operator.
        source: The reduced tensor.
        results: The results of the reduction.
        dims: The reduced dimensions. None or an empty list stands for all.
        keepdim: Whether the results have the reduced dimensions.
        accumulator: The bytes of the accumulator of a thread.
        vector: The number of elements that a thread reads at once.
    """
    if source.numel == 0:
        return
    max_threads = 256 if source.dtype is torch.complex128 else 512
    for loop in _Loop.of_reduction(source, results, dims, keepdim).in_32_bits():
        buffer, semaphores = loop.buffers(call.gpu, max_threads, accumulator, vector)
        with call:
            call.allocate(buffer)
            call.allocate(semaphores)


class _Loop:
    """The dimensions of a `TensorIterator`, innermost first, with the byte strides of its operands.

    The first operand is a result, and the last is the reduced tensor.
    """

    __slots__ = ("element", "offset", "operands", "sizes")

    def __init__(self, sizes: list[int], operands: list[list[int]], element: int, offset: int) -> None:
        self.sizes = sizes
        self.operands = operands
        self.element = element
        self.offset = offset  # of the reduced tensor, in bytes

    @classmethod
    def of_reduction(
        cls, source: Geometry, results: Sequence[Geometry], dims: Sequence[int] | None, keepdim: bool
    ) -> _Loop:
        element = source.element
        rank = len(source.sizes)
        reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
        shown = [_view_result(result, () if keepdim else sorted(reduced)) for result in results]
        shown.append((source.sizes, source.strides))
        shape = reduce(broadcast, [sizes for sizes, _ in shown])
        operands = [_byte_strides(sizes, strides, shape, element) for sizes, strides in shown]
        order = iteration_order(shape, operands, len(results))
        loop = cls(
            [shape[dim] for dim in order],
            [[strides[dim] for dim in order] for strides in operands],
            element,
            source.offset * element,
        )
        loop._coalesce()
        return loop

    def _coalesce(self) -> None:
        """Follow `coalesce_dimensions()`: merge dimensions that are contiguous in all operands."""
        sizes, operands = self.sizes, self.operands
        last = 0
        for dim in range(1, len(sizes)):
            outer, inner = sizes[dim], sizes[last]
            if inner == 1 or outer == 1 or all(inner * strides[last] == strides[dim] for strides in operands):
                if inner == 1:
                    for strides in operands:
                        strides[last] = strides[dim]
                sizes[last] *= outer
            else:
                last += 1
                sizes[last] = outer
                for strides in operands:
                    strides[last] = strides[dim]
        for values in (sizes, *operands):
            del values[last + 1 :]

    def in_32_bits(self) -> Iterator[_Loop]:
        """Follow `with_32bit_indexing()`: yield the parts into which large tensors are split."""
        if self._fits_32_bits():
            yield self
            return
        split, first = self._dim_to_split(), list(self.sizes)
        if first[split] < 2:  # an assertion of `TensorIteratorBase::split()`
            raise RuntimeError(f"PyTorch cannot split a reduction of the sizes {self.sizes} for 32-bit indexing.")
        first[split] //= 2
        second = list(self.sizes)
        second[split] -= first[split]
        offset = self.offset + self.operands[-1][split] * first[split]
        yield from _Loop(first, self.operands, self.element, self.offset).in_32_bits()
        yield from _Loop(second, self.operands, self.element, offset).in_32_bits()

    def _fits_32_bits(self) -> bool:
        """Follow `can_use_32bit_indexing()`."""
        return prod(self.sizes) <= MAX_INT32 and all(
            1 + sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True)) <= MAX_INT32
            for strides in self.operands
        )

    def _dim_to_split(self) -> int:
        """Follow `get_dim_to_split()`: return the outermost of the dimensions with the largest extent."""
        extents = [max((size - 1) * strides[dim] for strides in self.operands) for dim, size in enumerate(self.sizes)]
        return max(range(len(extents)), key=lambda dim: (extents[dim], dim))

    def buffers(self, gpu: Gpu, max_threads: int, accumulator: int, vector: int) -> tuple[int, int]:
        """Follow `setReduceConfig()`: return the bytes of the buffer and of the counters."""
        source, element = self.operands[-1], self.element
        rank = len(self.sizes)
        num_reduced = self.operands[0].count(0)
        outputs = prod(size for size, stride in zip(self.sizes, self.operands[0], strict=True) if stride)
        inputs = prod(self.sizes) // outputs  # per output
        is_along_x = num_reduced == rank or source[0] < source[num_reduced]
        dim0, dim1 = (inputs, outputs) if is_along_x else (outputs, inputs)
        output_vector = 1
        if rank == 0 or source[0 if is_along_x else num_reduced] == element:
            if not is_along_x:
                output_vector = self._output_vector(num_reduced)
                dim0 //= output_vector
            elif dim0 >= 128 and num_reduced == 1:
                dim0 //= vector
        width, height = _block(dim0, dim1, max_threads // output_vector)
        is_along_y = divide_up(inputs, width if is_along_x else 1) >= min(height * MIN_VALUES, MAX_VALUES)
        input_step = (width if is_along_x else 1) * (height if is_along_y else 1)
        output_step = (1 if is_along_x else width) * (1 if is_along_y else height)
        values = divide_up(inputs, input_step)  # per thread
        grid = divide_up(outputs // output_vector, output_step)
        target = gpu.multiprocessors * (gpu.max_threads_per_multiprocessor // (width * height))
        if not is_along_y or values < MAX_VALUES or grid > target:
            return 0, 0
        ctas = max(min(divide_up(target, grid), divide_up(values, MIN_VALUES)), divide_up(values, MAX_VALUES))
        if ctas == 1:
            return 0, 0
        return accumulator * outputs * ctas * (1 if is_along_x else width * output_vector), 4 * grid

    def _output_vector(self, output_dim: int) -> int:
        """Follow `get_output_vec_size()`: return how many adjacent results a thread can reduce to."""
        element = self.element
        strides = [stride // element for dim, stride in enumerate(self.operands[-1]) if dim != output_dim]
        size = 4
        for number in (self.offset // element, self.sizes[output_dim], *strides):
            while number % size:
                size //= 2
        return size


def _view_result(result: Geometry, inserted: Iterable[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Follow `review_reduce_result()`: return the sizes and strides with the reduced dimensions, in which it is 0."""
    sizes, strides = list(result.sizes), list(result.strides)
    for dim in inserted:
        sizes.insert(dim, 1)
        strides.insert(dim, 0)
    return sizes, strides


def _byte_strides(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int], element: int) -> list[int]:
    """Follow `compute_strides()`: return the strides of an operand that is broadcast to `shape`."""
    missing = len(shape) - len(sizes)
    return [0] * missing + [
        0 if size == 1 and whole != 1 else stride * element
        for size, whole, stride in zip(sizes, shape[missing:], strides, strict=True)
    ]


def _block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    """Follow `set_block_dimension()`: return the width and the height of a thread block."""
    power0 = last_power(dim0) if dim0 < most else most
    power1 = last_power(dim1) if dim1 < most else most
    height = min(power1, most // min(power0, WARP))
    return min(power0, most // height), height


# ---- The temporary storage of the CUB algorithms that PyTorch's kernels call (cub.cuh in ATen/cuda), in bytes


ALIGNMENT = 256

# By the bytes of the keys and values: the number of elements that a thread block sorts at once (tunings for sm90), and
# the largest number that one block sorts alone.
RADIX_TILES = {
    (1, 8): (3456, 2304),
    (2, 8): (5632, 2304),
    (4, 8): (5376, 2304),
    (8, 8): (4608, 2304),
    (4, 4): (6528, 4864),
    (8, 0): (5760, 2304),
}


def _aligned(nbytes: int) -> int:
    return divide_up(nbytes, ALIGNMENT) * ALIGNMENT


def _aliased(nbytes: int) -> int:
    """Follow `AliasTemporaries()`: each part, and possibly the whole, is aligned to 256 bytes."""
    return nbytes + ALIGNMENT - 1


def _tile_states(count: int, tile: int, state: int) -> int:
    """Return the size of the state of the tiles of a scan."""
    padding = 32
    return _aligned((divide_up(count, tile) + padding) * state)


def radix_sort_bytes(count: int, key: int, value: int, bits: int) -> int:
    """Return the storage of a sort: one pass per byte of the key ("onesweep"), from one buffer to another.

    Args:
        count: The number of elements.
        key: The bytes of a key.
        value: The bytes of a value, or 0 without values.
        bits: The number of the lowest bits of the keys that are compared.
    """
    tile, alone = RADIX_TILES.get((key, value), RADIX_TILES[8, 8])
    if count <= alone:
        return 1
    digits = 256
    passes = divide_up(bits, 8)
    bins = passes * digits * 8
    look_back = divide_up(count, tile) * digits * 4
    counters = _aligned(passes * 4)
    buffers = _aligned(count * key) + _aligned(count * value) if passes > 1 else 0
    return _aliased(bins + look_back + counters + buffers)


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """Return the storage of a sort of segments."""
    return _aliased(_aligned(count * key) + _aligned(count * value))


def scan_bytes(count: int, number: int) -> int:
    """Return the storage of a scan of numbers of `number` bytes.

    For numbers of 4 bytes a state is a word. Larger numbers and halves have more items or words.
    """
    tile, state = {2: (7680, 16), 4: (1920, 8)}.get(number, (896, 16))
    return _aliased(_tile_states(count, tile, state) + ALIGNMENT)


def scan_by_key_bytes(count: int) -> int:
    """Return the storage of a scan of the values of each key."""
    tile = 2464
    return _aliased(_tile_states(count, tile, 16) + _aligned((divide_up(count, tile) + 1) * 8))


def unique_by_key_bytes(count: int) -> int:
    """Return the storage of a selection of the first value of each key."""
    return _aliased(_tile_states(count, 2432, 8) + 2 * ALIGNMENT)


# ---- Permutations and samples: Randperm.cu, Distributions.cpp, MultinomialKernel.cu


@rule("randperm.out", "randperm.generator_out")
def _randperm(call: KernelCall) -> None:
    # `randperm_out_cuda()`: sorts numbers by random keys with enough bits that two are rarely equal.
    n: int = call.arguments[0]
    element = call.result().element
    call.allocate_and_free(element)  # `check_supported_max_int_with_precision()`
    if n == 0:
        return
    log_threshold = log(0.9) * 12  # Note [Algorithm of randperm]
    bits = min(64, ceil(log2(n - (6.0 * n * n + 1) / log_threshold)))
    key = 4 if bits <= 32 else 8
    call.allocate(n * element)
    for _ in range(2):  # the keys, and the sorted ones
        call.allocate(n * key)
    call.allocate(radix_sort_bytes(n, key, element, bits))


def _sample_largest(call: KernelCall) -> None:
    """Follow `multinomial_out()` without replacement.

    It checks the probabilities and divides them by random numbers. The largest quotients are the samples.
    """
    source, samples = call.tensor(0), call.arguments[1]
    element = source.element
    distributions = 1 if source.dim == 1 else source.sizes[0]
    smallest, largest = call.allocate(element), call.allocate(element)
    with call:
        reduce_on_gpu(call, source, [contiguous([], source.dtype)], accumulator=2 * element)
        is_finite, is_positive, _ = (call.allocate(1) for _ in range(3))  # and whether all are valid
        call.free(is_positive, is_finite)
        sums = call.allocate(distributions * element)
        result = contiguous(source.sizes[:-1], source.dtype)
        reduce_on_gpu(call, source, [result], [source.dim - 1], accumulator=accumulator_bytes(source.dtype))
        are_zero = call.allocate(distributions)
        if source.dim > 1:
            call.allocate(1)  # whether any is zero
            call.free(are_zero)
        call.free(sums)
        call.allocate_and_free(1)
        call.copy(source)  # the quotients
        call.allocate(distributions * samples * element if samples > 1 else 0)
    call.free(smallest, largest)


@rule("multinomial")
def _multinomial(call: KernelCall) -> None:
    call.allocate_results()
    source, (samples, replaces) = call.tensor(0), call.arguments[1:3]
    if source.numel == 0:
        return
    if not replaces or samples == 1:
        _sample_largest(call)
        return
    for _ in range(2):  # normalized probabilities, and their sums
        call.copy(source)
    if source.numel == source.sizes[-1]:
        call.allocate(scan_bytes(source.numel, source.element))


@rule("normal.Tensor_float")
def _normal_around_means(call: KernelCall) -> None:
    # `normal_out_impl()`: draws, scales, and adds the means.
    call.allocate_results()
    call.copy(call.result())


@rule("bernoulli_.Tensor")
def _bernoulli_of_probabilities(call: KernelCall) -> None:
    # `bernoulli_tensor_cuda_kernel()` reads probabilities as float, or as double for a double result.
    result, probabilities = call.tensor(0), call.tensor(1)
    dtype = torch.float64 if result.dtype is torch.float64 else torch.float32
    if probabilities.dtype is not dtype:
        call.allocate(probabilities.numel * dtype.itemsize)
