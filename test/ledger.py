"""Launches on a fake CUDA device: the null driver's trace, and the tensor of each draw.

A launch is a pure function of its arguments. So tensors with the same kernel launches (seeds, offsets and grids) have
the same bits on a real GPU. Tests that use this run under test/cuda_host/nullcuda.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Copy", "Draw", "Eager", "copies_of", "draws_of", "eager", "generator_states", "launches_of"]


class Draw(NamedTuple):
    """A launch of a kernel that draws."""

    numel: int
    seed: int
    offset: int
    grid: int
    block: int
    kernel: str


_read = 0


def _lines() -> list[str]:
    """Return the lines of the trace since the last call."""
    global _read
    with Path(os.environ["NULLCUDA_TRACE"]).open() as trace:
        trace.seek(_read)
        lines = trace.read()
        _read = trace.tell()
    return lines.splitlines()


def _draws(lines: list[str]) -> list[Draw]:
    draws = []
    for line in lines:
        if line.startswith("draw "):
            words = line.split(maxsplit=6)[1:]
            numbers = {key: int(value) for key, value in (word.split("=") for word in words[:5])}
            draws.append(Draw(**numbers, kernel=words[5]))
    return draws


def draws_of(run: Callable[[], object]) -> list[Draw]:
    """Return the draws that `run` launches, in order."""
    _lines()
    run()
    return _draws(_lines())


class Copy(NamedTuple):
    """A copy between the host and a device, such as `H->D`."""

    direction: str
    nbytes: int


def copies_of(run: Callable[[], object]) -> list[Copy]:
    """Return the copies that `run` makes, in order."""
    _lines()
    run()
    words = [line.split() for line in _lines() if "copy" in line.split(maxsplit=1)[0].lower()]
    return [Copy(direction, int(nbytes)) for _, direction, nbytes, *_ in words]


def launches_of(run: Callable[[], object]) -> list[str]:
    """Return the kernels that `run` launches, in order, with the arguments of draws."""
    _lines()
    run()
    return [line for line in _lines() if line.startswith(("launch ", "draw "))]


@dataclass
class Eager:
    """An eager construction: its result, all draws, and for each storage those that have not been overwritten since."""

    result: Any = None
    draws: list[Draw] = field(default_factory=list)
    by_storage: dict[int, list[tuple[range, Draw]]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> list[Draw]:
        return [draw for _, draw in self.by_storage.get(tensor.untyped_storage()._cdata, [])]


_OVERWRITE = {
    *(torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.copy_),
    *(torch.ops.aten.normal_, torch.ops.aten.uniform_),
}


def _without(old: range, written: range) -> tuple[int, int]:
    """Return the rest of `old` after `written` has covered one of its ends."""
    if written.start <= old.start < written.stop:
        return written.stop, old.stop
    if written.start < old.stop <= written.stop:
        return old.start, written.start
    return old.start, old.stop


class _NoteDraws(TorchDispatchMode):
    def __init__(self, eager: Eager) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eager = eager
        self._kept: list[Tensor] = []  # prevents reuse of storage addresses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _lines()
        results = func(*args, **(kwargs or {}))
        draws = _draws(_lines())
        self._eager.draws += draws
        for tensor in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self._note(func, tensor, draws)
        return results

    def _note(self, func: Any, tensor: Tensor, draws: list[Draw]) -> None:
        self._kept.append(tensor)
        storage = tensor.untyped_storage()
        noted = self._eager.by_storage.setdefault(storage._cdata, [])
        begin = tensor.storage_offset() * tensor.element_size()
        written = range(begin, begin + tensor.numel() * tensor.element_size())
        if tensor.is_contiguous() and func.overloadpacket in _OVERWRITE:
            left = [(range(*_without(old, written)), draw) for old, draw in noted]
            noted[:] = [(old, draw) for old, draw in left if old]
        noted += [(written, draw) for draw in draws]


def eager(build: Callable[[], Any]) -> Eager:
    """Run `build`, and record the storages of its draws."""
    noted = Eager()
    with _NoteDraws(noted):
        noted.result = build()
    return noted


def generator_states() -> list[tuple[int, int]]:
    """Return the seed and the offset of each device's default generator, and the next draws of the CPU's."""
    cpu = torch.get_rng_state()
    next_of_cpu = int(torch.randint(2**31, ()))
    torch.set_rng_state(cpu)
    devices = torch.cuda.default_generators
    return [(next_of_cpu, 0), *((generator.initial_seed(), generator.get_offset()) for generator in devices)]
