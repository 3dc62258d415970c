"""The vocabulary of the rules: the geometry of tensors, and kernels as lists of allocations and frees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

__all__ = [
    "NO_BLOCK",
    "RULES",
    "Geometry",
    "Gpu",
    "KernelCall",
    "Rule",
    "Steps",
    "broadcast",
    "contiguous",
    "copying",
    "count_bits",
    "divide_up",
    "in_format",
    "is_reduced",
    "iteration_order",
    "last_power",
    "rule",
    "steps_of",
]


# ---- Geometry without tensors: rules must not call operators


# The dimensions of each memory format, innermost first.
CHANNELS_LAST: dict[torch.memory_format, tuple[int, ...]] = {
    torch.channels_last: (1, 3, 2, 0),
    torch.channels_last_3d: (1, 4, 3, 2, 0),
}


class Geometry:
    """The sizes, strides, dtype and storage offset of a tensor. The methods follow those of `c10::TensorImpl`."""

    __slots__ = ("dtype", "element", "numel", "offset", "sizes", "strides")

    def __init__(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0) -> None:
        self.sizes: Sequence[int] = sizes
        self.strides: Sequence[int] = strides
        self.dtype: torch.dtype = dtype
        self.offset: int = offset
        self.numel: int = prod(sizes)
        self.element: int = dtype.itemsize

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """The size of a copy, in bytes."""
        return self.numel * self.element

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Follow `Tensor::is_contiguous()`."""
        if memory_format is torch.contiguous_format:
            return self.numel == 0 or self._is_compact(range(len(self.sizes) - 1, -1, -1))
        order = CHANNELS_LAST[memory_format]
        return len(order) == len(self.sizes) and self._is_compact(order)

    def is_dense(self) -> bool:
        """Follow `is_non_overlapping_and_dense()`."""
        return self.numel == 0 or self._is_compact(sorted(range(len(self.sizes)), key=self.strides.__getitem__))

    def _is_compact(self, order: Iterable[int]) -> bool:
        """Return true if each dimension is the size of the earlier ones in `order` apart."""
        expected = 1
        for dim in order:
            size = self.sizes[dim]
            if size != 1:
                if self.strides[dim] != expected:
                    return False
                expected *= size
        return True

    def memory_format(self) -> torch.memory_format:
        """Follow `Tensor::suggest_memory_format()`."""
        for memory_format, order in CHANNELS_LAST.items():
            if len(order) == len(self.sizes) and self._is_like_channels_last(order):
                return memory_format
        return torch.contiguous_format

    def _is_like_channels_last(self, order: Sequence[int]) -> bool:
        """Follow `is_channels_last_strides_2d_s4()` in c10."""
        of_channels = self.strides[1]
        if of_channels == 0:
            return False
        least = 0
        for dim in order:
            size, stride = self.sizes[dim], self.strides[dim]
            if size == 0 or stride < least or (dim == 0 and least == of_channels):
                return False
            least = stride * size
        return True

    def transpose(self, first: int, second: int) -> Geometry:
        """Return the geometry with two dimensions exchanged."""
        sizes, strides = list(self.sizes), list(self.strides)
        for values in (sizes, strides):
            values[first], values[second] = values[second], values[first]
        return Geometry(sizes, strides, self.dtype, self.offset)

    def dims_but(self, kept: int) -> list[int]:
        """Return all dimensions except one."""
        return [dim for dim in range(len(self.sizes)) if dim != kept]


def contiguous(sizes: Sequence[int], dtype: torch.dtype, order: Iterable[int] | None = None) -> Geometry:
    """Return the geometry of a new tensor. `order`: the dimensions, innermost first; by default from the last one."""
    strides = [1] * len(sizes)
    stride = 1
    for dim in range(len(sizes) - 1, -1, -1) if order is None else order:
        strides[dim] = stride
        stride *= max(sizes[dim], 1)
    return Geometry(sizes, strides, dtype)


def in_format(sizes: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format) -> Geometry:
    """Return the geometry of a new tensor in a memory format."""
    return contiguous(sizes, dtype, CHANNELS_LAST.get(memory_format))


def broadcast(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Follow `infer_size()`: the sizes that both broadcast to."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    offset = len(longer) - len(shorter)
    return [
        size if i < offset or shorter[i - offset] == 1 else shorter[i - offset] if size == 1 else size
        for i, size in enumerate(longer)
    ]


def iteration_order(sizes: Sequence[int], operands: Sequence[Sequence[int]], num_outputs: int = 0) -> list[int]:
    """Follow `TensorIteratorBase::reorder_dimensions()`: return the dimensions, innermost first.

    Args:
        sizes: The sizes of the iteration.
        operands: The strides of each operand.
        num_outputs: How many of the operands, at the beginning, are outputs of a reduction.
    """

    def compare(first: int, second: int) -> int:
        for number, strides in enumerate(operands):
            a, b = strides[first], strides[second]
            if number < num_outputs and (a == 0) != (b == 0):
                return 1 if b == 0 else -1
            if a == 0 or b == 0:
                continue
            if a != b:
                return 1 if a > b else -1
            if sizes[first] > sizes[second]:
                return 1
        return 0

    order = list(range(len(sizes) - 1, -1, -1))
    for i in range(1, len(order)):  # an insertion sort, because the comparison can be undecided
        moved = i
        for other in range(i - 1, -1, -1):
            decision = compare(order[other], order[moved])
            if decision > 0:
                order[other], order[moved] = order[moved], order[other]
                moved = other
            elif decision < 0:
                break
    return order


def is_reduced(dtype: torch.dtype) -> bool:
    """Follow `isReducedFloatingType()`: half precision and less."""
    return dtype.is_floating_point and dtype.itemsize <= 2


def divide_up(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def count_bits(largest: int) -> int:
    """Follow `get_num_bits()`: return the number of bits of numbers up to `largest`."""
    return max(largest.bit_length(), 1)


def last_power(n: int) -> int:
    """Return the largest power of two up to `n`, and 1 for 0."""
    return 1 << max(n.bit_length() - 1, 0)


# ---- Kernels as lists of allocations and frees


Step: TypeAlias = tuple[int, int, int]
"""A `KernelStep` of csrc/extensions/memory/memory_counter.h: its kind, its bytes, and the number of its block."""

Steps: TypeAlias = tuple[list[Step], list[Step]]
"""The steps before and after the results."""

ALLOCATE, FREE, WORKSPACE, RESULT = range(4)  # the kinds of steps

NO_BLOCK = -1
"""The number of a block of 0 bytes, for which the allocator returns no memory, or of a copy that is not needed."""


class Gpu(NamedTuple):
    """The properties of a GPU that rules read."""

    major: int
    multiprocessors: int
    max_threads_per_multiprocessor: int


class KernelCall:
    """A call of an operator, and the steps of its kernel so far.

    Rules follow the kernels line by line, in the order of allocation. A rule that does not call `allocate_results()`
    describes a kernel that allocates all its results last. Blocks that a rule does not free are freed at its end, the
    last one first, as C++ destroys local variables. A block `with call:` frees those allocated in it in the same way.

    Args:
        arguments: The arguments by position. A tensor is a `Geometry`, and None if it is undefined.
        results: The results, in the same form.
        gpu: The device.
    """

    __slots__ = ("_alive", "_count", "_scopes", "_steps", "arguments", "gpu", "results", "steps")

    def __init__(self, arguments: Sequence[Any], results: Sequence[Any], gpu: Gpu) -> None:
        self.arguments: Sequence[Any] = arguments
        self.results: Sequence[Any] = results
        self.gpu: Gpu = gpu
        self.steps: Steps = ([], [])
        self._steps = self.steps[0]
        self._count = 0
        self._alive: list[int] = []
        self._scopes: list[int] = []

    def tensor(self, i: int) -> Geometry:
        """Return an argument that is a tensor."""
        tensor: Geometry = self.arguments[i]
        return tensor

    def result(self, i: int = 0) -> Geometry:
        """Return a result that is a tensor."""
        result: Geometry = self.results[i]
        return result

    def allocate_results(self, *in_order: int) -> None:
        """Allocate some results, in this order. By default all that remain, in the order that the operator returns."""
        if in_order:
            self._steps += [(RESULT, 0, number) for number in in_order]
        else:
            self._steps = self.steps[1]

    def allocate(self, nbytes: int) -> int:
        """Allocate a block besides the results, and return its number."""
        if nbytes <= 0:
            return NO_BLOCK
        block = self._count
        self._count += 1
        self._alive.append(block)
        self._steps.append((ALLOCATE, nbytes, block))
        return block

    def free(self, *blocks: int) -> None:
        """Free blocks in this order."""
        for block in blocks:
            if block != NO_BLOCK:
                self._alive.remove(block)
                self._steps.append((FREE, 0, block))

    def allocate_and_free(self, nbytes: int) -> None:
        """Allocate a block and free it at once."""
        self.free(self.allocate(nbytes))

    def __enter__(self) -> KernelCall:
        self._scopes.append(len(self._alive))
        return self

    def __exit__(self, *error: object) -> None:
        self.free(*self._alive[: self._scopes.pop() - len(self._alive) - 1 : -1])

    def keep_workspace(self, workspace: int, nbytes: int) -> None:
        """Require memory that the thread keeps for its stream once it has been allocated."""
        if nbytes > 0:
            self._steps.append((WORKSPACE, nbytes, workspace))

    def copy(self, tensor: Geometry) -> int:
        """Allocate a copy of all elements of `tensor`."""
        return self.allocate(tensor.nbytes)

    def copy_unless(self, is_readable: bool, tensor: Geometry) -> int:
        """Copy `tensor`, unless the kernel can read it."""
        return NO_BLOCK if is_readable else self.copy(tensor)

    def contiguous(self, *tensors: Geometry) -> None:
        """Copy tensors unless they are contiguous, as `contiguous()` does."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                self.copy(tensor)


Rule: TypeAlias = Callable[[KernelCall], None]
"""Describes the kernel of a call by adding its steps."""

RULES: dict[str, Rule] = {}
"""The rules by the full names of operators."""


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule of operators of `aten`. A name without an overload is the one with an empty overload name."""

    def register(function: Rule) -> Rule:
        RULES.update((f"aten::{operator}", function) for operator in operators)
        return function

    return register


def copying(*, before: Sequence[int] = (), after: Sequence[int] = ()) -> Rule:
    """Return the rule of a kernel that only copies arguments that are not contiguous, before or after the results."""

    def describe(call: KernelCall) -> None:
        call.contiguous(*[call.tensor(i) for i in before])
        call.allocate_results()
        call.contiguous(*[call.tensor(i) for i in after])

    return describe


def steps_of(operator: str, arguments: Sequence[Any], results: Sequence[Any], gpu: Sequence[int]) -> Steps:
    """Return the steps of the kernel of a call. The core calls this: csrc/python/memory.cpp."""
    call = KernelCall(arguments, results, Gpu(*gpu))
    with call:
        RULES[operator](call)
    return call.steps
