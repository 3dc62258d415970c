"""Advice: the simulated combinations of remedies, and the cheapest one that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..descriptions import UNLIMITED, FakeGPU
from ..internals.document import Code, Column, Document, Part, Table
from ..internals.text import in_units
from .remedies import Accumulate, Checkpoint, Numerics, Remedy

__all__ = ["Advice", "Outcome", "outcome_on"]


@dataclass(frozen=True)
class Outcome:
    """A simulated run of a program with some remedies.

    Attributes:
        remedies: The remedies; empty for the unchanged program.
        fits: Whether it ran to its end on the GPU.
        peak_reserved: The peak of the bytes reserved on the GPU; of several GPUs, the highest. If the program does not
            fit, the memory that it needs.
        peak_allocated: The peak of the allocated bytes.
        flops: The floating-point operations of a step; None if they were not counted.
        pinned: The peak of pinned memory of the host in bytes.
        bytes_sent: The bytes that a step sends in collectives.
        error: The error of the program; empty if it ended or does not fit.
    """

    remedies: tuple[Remedy, ...]
    fits: bool
    peak_reserved: int
    peak_allocated: int
    flops: int | None = None
    pinned: int = 0
    bytes_sent: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """The names of the remedies."""
        return " + ".join(map(str, self.remedies)) or "unchanged"

    @property
    def numerics(self) -> Numerics:
        """The largest effect of a remedy on the computed values."""
        return max((remedy.numerics for remedy in self.remedies), default=Numerics.EXACT)

    @property
    def snippet(self) -> str:
        """The changes of the program, in an order in which they can be made."""
        return "\n\n".join(f"# {remedy}\n{remedy.snippet}" for remedy in self.remedies)

    @property
    def checkpointed(self) -> int:
        """The number of checkpointed blocks."""
        return sum(len(one.blocks) for one in self.remedies if isinstance(one, Checkpoint))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return next((one.count for one in self.remedies if isinstance(one, Accumulate)), 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as builtin types, for JSON."""
        return {
            "name": self.name,
            "remedies": [remedy.to_dict() for remedy in self.remedies],
            "numerics": self.numerics.name.lower(),
            "fits": self.fits,
            **{name: getattr(self, name) for name in ("peak_reserved", "peak_allocated", "flops", "pinned")},
            "bytes_sent": self.bytes_sent,
            "error": self.error,
        }

    def __repr__(self) -> str:
        return f"Outcome({self.name}: {in_units(self.peak_reserved)} reserved)"


def outcome_on(gpu: FakeGPU, run: Callable[[FakeGPU], Outcome]) -> Outcome:
    """Run a program with unlimited memory, and on `gpu` if the answer depends on it.

    A run that reserves less than the GPU has is the same on it, and one that allocates more does not fit. A run between
    these may fit, because the allocator frees its cache when the GPU is full.

    Args:
        gpu: The GPU.
        run: Runs the program on a GPU.

    Returns:
        The run on `gpu`; if the program does not fit, the memory that it needs.
    """
    if not gpu.has_limit:
        return run(gpu)
    capacity = gpu.memory - gpu.context
    outcome = run(replace(gpu, memory=UNLIMITED))
    if outcome.peak_allocated <= capacity < outcome.peak_reserved and (limited := run(gpu)).fits:
        return limited
    return replace(outcome, fits=outcome.fits and outcome.peak_reserved <= capacity)


@dataclass(frozen=True)
class Advice(Document):
    """The answer of `advise()`. True in conditions if a simulated combination fits. Prints as tables.

    Attributes:
        gpu: The name of the GPU.
        limit: The bytes that the program may reserve.
        baseline: The unchanged program.
        outcomes: All simulated runs that ended without an error of the program, in order.
        failed: The runs in which the program failed.
        is_complete: Whether the search ended before its limit of time or of simulations.
    """

    gpu: str
    limit: int
    baseline: Outcome
    outcomes: tuple[Outcome, ...]
    failed: tuple[Outcome, ...] = ()
    is_complete: bool = True

    def meets(self, outcome: Outcome) -> bool:
        """Return true if a run fits within the limit."""
        return outcome.fits and outcome.peak_reserved <= self.limit

    def cost(self, outcome: Outcome) -> tuple[float, ...]:
        """Return a key that sorts runs by their cost.

        In descending order: changes of the values, copies to the host, the number of micro-batches, operations,
        messages, and the number of remedies.
        """
        level = max(outcome.numerics, Numerics.ROUNDING)
        amounts = outcome.pinned, outcome.micro_batches, outcome.flops or outcome.checkpointed, outcome.bytes_sent
        return (level, *amounts, len(outcome.remedies), outcome.peak_reserved)

    @cached_property
    def solution(self) -> Outcome | None:
        """The cheapest run that fits within the limit; None if no simulated run does."""
        return min(filter(self.meets, self.outcomes), key=self.cost, default=None)

    @cached_property
    def lowest_peak(self) -> Outcome:
        """The run with the lowest peak of reserved memory."""
        return min(self.outcomes, key=lambda one: (one.peak_reserved, self.cost(one)))

    @cached_property
    def trade_offs(self) -> tuple[Outcome, ...]:
        """The runs with a lower peak than all runs with fewer operations, the fewest operations first.

        These are runs that keep the batch and the numerics, except for rounding, and copy nothing to the host.
        """
        usable = (
            one
            for one in self.outcomes
            if one.numerics <= Numerics.ROUNDING
            and one.pinned <= self.baseline.pinned
            and one.micro_batches == 1
            and one.flops is not None
        )
        front: list[Outcome] = []
        for one in sorted(usable, key=lambda one: (one.flops, one.peak_reserved, len(one.remedies))):
            if not front or one.peak_reserved < front[-1].peak_reserved:
                front.append(one)
        return tuple(front)

    @property
    def singles(self) -> tuple[Outcome, ...]:
        """The runs with one remedy, or with all blocks checkpointed."""
        return tuple(
            one
            for one in self.outcomes
            if len(one.remedies) == 1 and (not isinstance(only := one.remedies[0], Checkpoint) or only.is_full)
        )

    def table(self, outcomes: Iterable[Outcome], title: str = "") -> Table:
        """Return a table of runs, with the differences from the unchanged program."""
        columns = (
            *("remedies", Column("reserved", in_units), Column("change", CHANGE), Column("allocated", in_units)),
            *(Column("FLOPs", CHANGE, is_optional=True), Column("to host", in_units, is_optional=True)),
            *(Column("sent", in_units, is_optional=True), "values", "fits"),
        )
        return Table(columns, map(self._row, outcomes), title)

    def _row(self, one: Outcome) -> tuple[Any, ...]:
        base = self.baseline
        return (
            *(one.name, one.peak_reserved, _percent(one.peak_reserved, base.peak_reserved), one.peak_allocated),
            None if None in (one.flops, base.flops) else _percent(one.flops or 0, base.flops or 0),
            *((one.pinned - base.pinned) or None, (one.bytes_sent - base.bytes_sent) or None),
            *("same" if one.numerics is Numerics.EXACT else one.numerics.name.lower(), "yes" * self.meets(one) or "no"),
        )

    def __bool__(self) -> bool:
        return self.solution is not None

    def _parts(self) -> Iterator[Part]:
        yield self._answer()
        yield self.table((self.baseline, *self.singles), "One remedy")
        if len(self.trade_offs) > 1:
            yield self.table(self.trade_offs, "Least memory for the operations of a step")
        yield "\n".join(f"Not possible: {one.name}: {one.error}" for one in self.failed)
        if self.solution is not None and self.solution.remedies:
            yield f"To apply {self.solution.name}:"
            yield Code(self.solution.snippet)

    def _answer(self) -> str:
        need = f"The program reserves {in_units(self.baseline.peak_reserved)}; the limit is {in_units(self.limit)}"
        lines = [f"{need} on {self.gpu}."]
        found = self.solution
        if found is None:
            lines.append(
                f"No simulated combination fits. The lowest peak is {in_units(self.lowest_peak.peak_reserved)}, with: "
                f"{self.lowest_peak.name}."
            )
        elif not found.remedies:
            lines.append("It fits without changes.")
        else:
            is_counted = None not in (found.flops, self.baseline.flops)
            flops = CHANGE(_percent(found.flops or 0, self.baseline.flops or 0))
            lines.append(
                f"The cheapest combination that fits reserves {in_units(found.peak_reserved)}"
                f"{f', with {flops} operations' if is_counted else ''}: {found.name}."
            )
        end = "." if self.is_complete else "; the search was ended by its limit."
        lines.append(f"{len(self.outcomes) + len(self.failed)} runs were simulated{end}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        found = "no solution" if self.solution is None else self.solution.name
        return f"<Advice: {found}, {len(self.outcomes)} runs>"

    def to_dict(self) -> dict[str, Any]:
        """Return the runs as builtin types, for JSON."""
        return {
            "gpu": self.gpu,
            "limit": self.limit,
            "is_complete": self.is_complete,
            "baseline": self.baseline.to_dict(),
            "solution": None if self.solution is None else self.solution.to_dict() | {"snippet": self.solution.snippet},
            "front": [one.to_dict() for one in self.trade_offs],
            "outcomes": [one.to_dict() for one in self.outcomes],
            "failed": [one.to_dict() for one in self.failed],
        }


CHANGE = "{:+.1f} %".format


def _percent(value: int, base: int) -> float:
    """Return the change of a value in percent."""
    return 100 * (value - base) / base if base else 0.0
