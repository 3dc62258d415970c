"""The plan of materializing, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import Module

from .. import _C
from ..internals.held_tensors import held_tensors
from ..internals.results import Column, Items, Table, plain
from ..internals.text import readable
from .explanations import PlannedCall, Program, RecordedOperation

__all__ = ["PlannedOperation", "ReplayPlan", "plan"]

Way: TypeAlias = Literal["call", "parts", "takes over", "step"]
Memory: TypeAlias = Literal["result", "new", "copy", "in place", "resized", "taken over"]

# In the order of `Way` and `Origin` of csrc/core/deferred_init/plan/replay_plan.h, without operators that do not run.
WAYS: tuple[Way, ...] = ("call", "parts", "takes over", "step")
MEMORIES: tuple[Memory, ...] = ("result", "new", "copy", "in place", "resized", "taken over")


@dataclass(frozen=True)
class PlannedOperation:
    """An operator that a replay runs."""

    operation: RecordedOperation
    """The recorded call."""
    way: Way
    """`"call"`: once, as recorded. `"parts"`: for `operation.parts` only. `"takes over"`: it copies a value that has no
    other reader, so the memory of that value becomes the copy. `"step"`: on each section of a random fill, while the
    section is in the cache."""
    fill: int | None
    """For a step, the number of the filled value."""
    memory: tuple[Memory, ...]
    """The memory of each value that it writes: `"result"` of its kernel, `"new"`, a `"copy"` of an argument that is
    read again, or an argument that is not: overwritten `"in place"`, `"resized"`, or `"taken over"`."""
    nbytes: tuple[int, ...]
    """The bytes of each of these values."""
    drops: tuple[int, ...]
    """The numbers of the values that are not needed afterwards."""

    def __str__(self) -> str:
        notes = [_note(memory, nbytes) for memory, nbytes in zip(self.memory, self.nbytes, strict=True)]
        if self.fill is not None:
            notes.append(f"while %{self.fill} is filled")
        if self.drops:
            notes.append(f"then drops {', '.join(f'%{number}' for number in self.drops)}")
        text = str(self.operation)
        return f"{text}; {'; '.join(notes)}" if "  # " in text else f"{text}  # {'; '.join(notes)}"


def _note(memory: Memory, nbytes: int) -> str:
    notes = {"in place": "in place", "taken over": "takes it over", "copy": f"a copy, {readable(nbytes)}"}
    return notes.get(memory, readable(nbytes))


class ReplayPlan(Items[PlannedOperation]):
    """The operators that a replay runs, in order. Prints as a program, with a line for each."""

    def __init__(self, operations: Sequence[PlannedOperation], peak: int, written: int) -> None:
        super().__init__(operations)
        self.peak = peak
        """The peak of the memory in use, in bytes, results included. Memory that kernels allocate is estimated."""
        self.written = written
        """The bytes that all operators write."""

    def __str__(self) -> str:
        total = f"at most {readable(self.peak)} at one time, {readable(self.written)} written"
        return "\n".join([*map(str, self._items), total])

    def _repr_html_(self) -> str:
        columns = [*map(Column, ("values", "call", "way", "memory")), Column("bytes", readable, is_number=True)]
        rows = [
            (
                ", ".join(map(str, one.operation.writes)),
                one.operation.call,
                one.way,
                ", ".join(one.memory),
                sum(one.nbytes),
            )
            for one in self
        ]
        return Table(columns, rows)._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the operators, and the bytes held at most and written in all, as plain values."""
        return {"operations": plain(self._items), "peak": self.peak, "written": self.written}


def plan(target: torch.Tensor | Iterable[torch.Tensor] | Module) -> ReplayPlan:
    """Return the operators that materializing `target` would run, without running any.

    `materialize_tensor` and `materialize_module` execute the same plan when they put values where they were recorded.
    With another device or dtype, storages are computed one by one. Values that were computed when the constructor read
    them, and kept, are not computed again, so their operators are not listed.

    Args:
        target: A deferred tensor, several of them, or a module, whose deferred tensors are computed together.

    Returns:
        The operators in the order in which they run, with their memory, as a sequence that prints as a program.

    Raises:
        TypeError: `target` is of another type.
        ValueError: A tensor has no recording.

    Example:
        >>> print(plan(deferred_init(lambda: torch.nn.Linear(4, 4, bias=False).half())))
        %1: float32[4, 4] = aten::uniform_(%0, -0.4..., 0.4...)  # 16 draws from 0; 64 B
        %2: float16[4, 4] = aten::_to_copy(%1, dtype=float16)  # 32 B; then drops %1
        at most 96 B at one time, 96 B written
    """
    program = Program(_tensors_of(target), uses_computed=True)
    return ReplayPlan(list(_in_order(program.planned)), program.peak, program.written)


def _tensors_of(target: torch.Tensor | Iterable[torch.Tensor] | Module) -> list[torch.Tensor]:
    if isinstance(target, torch.Tensor):
        return [target]
    if isinstance(target, Module):
        return [held.tensor for held in held_tensors(target) if _C.is_deferred(held.tensor)]
    tensors = list(target) if isinstance(target, Iterable) else [target]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"plan() takes a tensor, an iterable of tensors or a module, not {type(tensor).__name__}.")
    return tensors


def _in_order(planned: list[PlannedCall]) -> Iterator[PlannedOperation]:
    fill_of = {place: call.operation.writes[0].number for call in planned for place in call.plan.steps}
    for operation, of, drops in sorted(planned, key=lambda call: call.plan.place):
        yield PlannedOperation(
            operation=operation,
            way=WAYS[of.way - 1],
            fill=fill_of.get(of.place),
            memory=tuple(MEMORIES[origin] for origin, _ in of.memory),
            nbytes=tuple(nbytes for _, nbytes in of.memory),
            drops=drops,
        )
