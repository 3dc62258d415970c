"""Rejection samplers in bounded memory.

Such a sampler fills a tensor, finds the elements to reject, fills a second tensor of that size, replaces those
elements, and repeats. The number of draws is known only after it has run. Each element depends only on its own element
of the fills. The sampler can therefore run chunk by chunk, if each fill of a chunk gets the numbers that the chunk
would get in a fill of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _C

__all__ = ["CHUNK", "Sampler", "count_draws", "sample"]

Sampler = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a tensor in place, by `normal_` and `uniform_` of tensors of its size with the given generator."""

CHUNK = 2**20
"""Number of elements that are sampled at a time. `normal_` gives the pieces of a tensor the same bits as the whole if
their lengths are multiples of 16. The last piece may have any length from 16 on (`normal_fill`)."""

_DEFAULTS = {"normal_": (0.0, 1.0), "uniform_": (0.0, 1.0)}


class _FillsOfAChunk(TorchFunctionMode):
    """A mode in which each fill of a chunk at `start` gets that chunk's numbers in a fill of `numel` elements."""

    def __init__(self, start: int, numel: int) -> None:
        super().__init__()
        self._start = start
        self._numel = numel
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DEFAULTS:
            return func(*args, **kwargs)
        chunk, *given = args
        numbers = [float(number) for number in (*given, *_DEFAULTS[name][len(given) :])]
        generator = kwargs["generator"]
        at_chunk = generator.clone_state()
        _C.skip_fill(name, self._start, chunk.dtype, numbers, at_chunk)
        func(chunk, *numbers, generator=at_chunk)
        self.draws += _C.skip_fill(name, self._numel, chunk.dtype, numbers, generator)
        return chunk


def count_draws(sampler: Sampler, numel: int, dtype: torch.dtype, generator: torch.Generator) -> int:
    """Return the number of 32-bit draws for sampling `numel` elements of `dtype`. `generator` does not advance."""

    def draws(start: int, size: int) -> int:
        fills = _FillsOfAChunk(start, numel)
        with fills:
            sampler(torch.empty(size, dtype=dtype), generator.clone_state())
        return fills.draws

    return max(draws(start, size) for start, size in _chunks(numel))


def sample(sampler: Sampler, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill the contiguous `tensor` and advance `generator` exactly like `sampler`, chunk by chunk."""
    flat = tensor.view(-1)
    end, most_draws = generator, -1
    for start, size in _chunks(tensor.numel()):
        at_start = generator.clone_state()
        fills = _FillsOfAChunk(start, tensor.numel())
        with fills:
            sampler(flat[start : start + size], at_start)
        if fills.draws > most_draws:
            end, most_draws = at_start, fills.draws
    generator.set_state(end.get_state())


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each chunk. The last one is up to twice as long."""
    starts = range(0, max(numel - CHUNK, 1), CHUNK)
    for start in starts:
        yield start, (numel if start == starts[-1] else start + CHUNK) - start
