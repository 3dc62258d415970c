"""Samplers that draw again what they reject, in bounded memory.

Such a sampler fills a tensor, looks which elements it must reject, fills a second tensor of that size, takes those
elements from it, looks again, and so on. How many numbers it draws is known only when it has been run. What becomes of
an element depends on that element of the fills alone, so the sampler can be run on one chunk after another, if each of
its fills of a chunk gets the numbers that the chunk would get in a fill of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _C

__all__ = ["CHUNK", "Sampler", "count_draws", "sample"]

Sampler = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a tensor in place, by `normal_` and `uniform_` of tensors of its size with the generator that it is given."""

CHUNK = 2**20
"""How many elements are sampled at a time. `normal_` gives the pieces of a tensor the same bits as the whole if they
are multiples of 16 elements long, but for the last one, which must not be shorter than that (`normal_fill`)."""

_DEFAULTS = {"normal_": (0.0, 1.0), "uniform_": (0.0, 1.0)}


class _FillsOfAChunk(TorchFunctionMode):
    """Gives each fill of a chunk, which begins at `start`, the numbers of that chunk in a fill of `numel` elements."""

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
    """Returns how many 32-bit draws it takes to sample `numel` elements of `dtype`. Leaves `generator` where it is."""

    def draws(start: int, size: int) -> int:
        fills = _FillsOfAChunk(start, numel)
        with fills:
            sampler(torch.empty(size, dtype=dtype), generator.clone_state())
        return fills.draws

    return max(draws(start, size) for start, size in _chunks(numel))


def sample(sampler: Sampler, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Does to `tensor`, which is contiguous, and `generator` what `sampler` does to them, chunk by chunk."""
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
    """Yields the start and the size of each chunk; the last one is up to twice as long."""
    starts = range(0, max(numel - CHUNK, 1), CHUNK)
    for start in starts:
        yield start, (numel if start == starts[-1] else start + CHUNK) - start
