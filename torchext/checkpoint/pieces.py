"""Tensors in pieces of bounded size, computed one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import _C
from ..tools.sizes import readable
from .tensors import shows_all

__all__ = ["LARGEST_PIECE", "Budget", "Pieces", "cut", "parts_of_shape", "recorded_as"]

LARGEST_PIECE = 16 << 20
"""The allocator reuses memory up to this size. It returns larger memory to the system immediately."""

SMALLEST_PIECE = 64 << 10

OVERHEAD = 2 << 20
"""The memory of Python and the recording, in bytes."""

IN_FLIGHT = 2
"""The number of pieces besides the computed one: one waits, and one is being written."""


class Budget(NamedTuple):
    """The memory that writing may use."""

    max_memory: int
    """The total in bytes."""

    @property
    def piece(self) -> int:
        """The size of a piece in bytes."""
        return max(SMALLEST_PIECE, min(LARGEST_PIECE, (self.max_memory - OVERHEAD) // 8))

    @property
    def for_computing(self) -> int:
        """The memory for computing one piece."""
        return self.max_memory - self.beside_computing

    @property
    def beside_computing(self) -> int:
        """The rest: waiting pieces, and freed memory that is not reused."""
        return IN_FLIGHT * self.piece + self.slack + OVERHEAD

    @property
    def slack(self) -> int:
        """The freed memory that is not returned to the system immediately."""
        return self.piece


@dataclass(frozen=True)
class Pieces:
    """A tensor, divided into pieces."""

    tensor: torch.Tensor
    dtype: torch.dtype
    """The dtype in the file."""
    piece: int
    """The size of a piece in elements. 0 if the tensor is computed as a whole, and then divided."""
    nbytes: int
    needs: int
    """The memory for computing a piece, in bytes."""
    is_on_device: bool = False
    """Whether the whole tensor is computed in the memory of a device, and copied in pieces."""

    def values(self, memory: _C.RecycledMemory) -> Iterator[torch.Tensor]:
        """Yield the elements in order, as real CPU tensors that are computed in `memory`."""
        elements = max(1, LARGEST_PIECE // self.dtype.itemsize)
        if self.is_on_device:
            whole = _C.evaluate_in(recorded_as(self.tensor, self.dtype), memory)
            yield from (whole[part].to("cpu") for part in parts_of_shape(whole.shape, self.piece))
        elif self.piece == 0:
            whole = _values(self.tensor, self.dtype, memory)
            yield from (whole[part] for part in parts_of_shape(whole.shape, elements))
        else:
            yield from (
                _values(self.tensor[part], self.dtype, memory) for part in parts_of_shape(self.tensor.shape, self.piece)
            )


def cut(name: str, tensor: torch.Tensor, dtype: torch.dtype, budget: Budget) -> Pieces:
    """Divide a tensor so that each piece can be computed in the memory of `budget`.

    Random fills, copies and simple arithmetic are computed piece by piece. Other operators, such as `orthogonal_`, are
    computed once, as a whole, if memory allows.

    Raises:
        MemoryError: The memory is too small. The message contains the required size.
    """
    tensor = tensor.detach()
    nbytes = tensor.numel() * dtype.itemsize
    size = max(1, budget.piece // max(dtype.itemsize, tensor.itemsize))
    if not _C.is_deferred(tensor):
        return Pieces(tensor, dtype, size, nbytes, IN_FLIGHT * budget.piece)
    if tensor.numel() == 0:
        return Pieces(tensor, dtype, 0, nbytes, 0)
    whole, work = _needs(tensor, dtype)
    if tensor.is_cuda and whole <= budget.for_computing:  # computed at once in the device's memory
        return Pieces(tensor, dtype, size, nbytes, whole + budget.piece, is_on_device=True)
    if tensor.numel() <= size and whole <= budget.for_computing:
        return Pieces(tensor, dtype, 0, nbytes, whole)
    while True:
        part = _middle(tensor, size)
        of_part, work_of_part = _needs(tensor[part], dtype)
        is_cheap = work_of_part * tensor.numel() <= 2 * work * tensor[part].numel()
        if is_cheap and of_part <= budget.for_computing:
            return Pieces(tensor, dtype, size, nbytes, of_part)
        if not is_cheap or size * tensor.itemsize <= SMALLEST_PIECE:
            break
        size //= 2
    if whole <= budget.for_computing:
        return Pieces(tensor, dtype, 0, nbytes, whole)
    if of_part <= budget.for_computing:
        return Pieces(tensor, dtype, size, nbytes, of_part)
    needed = min(whole, of_part) + budget.beside_computing
    raise MemoryError(
        f"Computing `{name}` of shape {tuple(tensor.shape)} takes {readable(needed)}, because not all of its operators "
        f"can be computed in parts, but `max_memory` is {readable(budget.max_memory)}. Increase it, or materialize "
        "this tensor first. explain() lists its operators."
    )


def _values(tensor: torch.Tensor, dtype: torch.dtype, memory: _C.RecycledMemory) -> torch.Tensor:
    if _C.is_deferred(tensor):
        return _C.evaluate_in(recorded_as(tensor, dtype), memory).to("cpu")
    with torch.no_grad():
        return tensor.to("cpu", dtype).resolve_conj().resolve_neg().contiguous()


def recorded_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a deferred tensor that shows all of its storage, in order."""
    with torch.no_grad():
        result = tensor.to(dtype).resolve_conj().resolve_neg().contiguous()
        return result if shows_all(result) else result.clone(memory_format=torch.contiguous_format)


def _needs(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    return _C.needs_of_evaluating(recorded_as(tensor, dtype))


Part = tuple[int | slice, ...]


def parts_of_shape(shape: torch.Size, elements: int) -> Iterator[Part]:
    """Divide a shape, in the order of its elements, into parts of at most `elements` elements."""
    cut_at = _dimension_to_cut(shape, elements)
    if cut_at == len(shape):
        for i in range(math.prod(shape)):
            yield _index_of(i, shape)
        return
    step = _step(shape, cut_at, elements)
    for i in range(math.prod(shape[:cut_at])):
        outer = _index_of(i, shape[:cut_at])
        for begin in range(0, shape[cut_at], step):
            yield (*outer, slice(begin, begin + step))


def _middle(tensor: torch.Tensor, elements: int) -> Part:
    """Return one of these parts, with others before and after it."""
    shape = tensor.shape
    cut_at = _dimension_to_cut(shape, elements)
    if cut_at == len(shape):
        return tuple(size // 2 for size in shape)
    step = _step(shape, cut_at, elements)
    begin = shape[cut_at] // 2 // step * step
    return (*(size // 2 for size in shape[:cut_at]), slice(begin, begin + step))


def _dimension_to_cut(shape: torch.Size, elements: int) -> int:
    """Return the first dimension whose entries have at most `elements` elements."""
    for dim in range(len(shape)):
        if math.prod(shape[dim + 1 :]) <= elements:
            return dim
    return len(shape)


def _step(shape: torch.Size, dim: int, elements: int) -> int:
    return max(1, elements // max(1, math.prod(shape[dim + 1 :])))


def _index_of(number: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.append(at)
    return tuple(reversed(index))
