"""What a process sends and receives, collective by collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Collective", "GroupSummary", "Phase", "peers_of", "summarize", "summarize_phases"]

Phase = tuple[str, int, int]
"""A name, and the numbers of the first collective and of that after the last."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective, or of a send or receive.

    Attributes:
        operator: The name of the operator of `c10d`, such as `_allgather_base_`, without the underscores.
        group: The name of the process group: `world`, the name of the dimension of a device mesh, or PyTorch's.
        ranks: The global ranks of its processes.
        backend: The backend that the program has asked for.
        bytes_in: The bytes that this process gives.
        bytes_out: The bytes of what this process is given.
        dtype: The dtype of what is sent, such as `torch.bfloat16`; "mixed" if there are several.
        reduction: `SUM`, `AVG` and so on, or an empty string.
        peer: The rank in the group of the other process of a send or receive, or of the root; None if there is none.
        device: Where the tensors are.
        stream: The stream that was current, as a number; 0 is the default stream of the device.
        is_async: Whether the program went on without waiting for it.
        issued_in: The module that was running, by its name in the model or by its class, and the phase:
            `forward`, `backward`, `optimizer` or an empty string.
        waited_in: The same of the place where the program waited for it, or had a stream wait; None if it did not.
        overlap: How many operators a GPU may run while it runs: those that were issued on the stream that waits for it,
            after the last one for which it has to wait itself.
        overlaps_with: Where these were issued.
        line: The line of the program that led to it, `file:line in function`; empty unless it was asked for.
    """

    operator: str
    group: str
    ranks: tuple[int, ...]
    backend: str
    bytes_in: int
    bytes_out: int
    dtype: str
    reduction: str
    peer: int | None
    device: str
    stream: int
    is_async: bool
    issued_in: Place
    waited_in: Place | None
    line: str
    overlap: int = 0
    overlaps_with: tuple[Place, ...] = ()

    @property
    def group_size(self) -> int:
        """How many processes take part."""
        return len(self.ranks)

    @property
    def overlaps(self) -> bool:
        """Whether something else may run meanwhile.

        On a GPU, operators that need not wait for it; elsewhere, what the program does in another module, or another
        phase, before it waits.
        """
        return self.overlap > 0 or (self.is_async and self.waited_in != self.issued_in)


@dataclass(frozen=True)
class Place:
    """Where a program stands.

    Attributes:
        module: The module that was running; empty if none was.
        phase: `forward`, `backward`, `optimizer` or an empty string.
    """

    module: str
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module and self.phase else self.module or self.phase


@dataclass(frozen=True)
class GroupSummary:
    """The collectives of one operator in one group.

    Attributes:
        group: The name of the group.
        group_size: How many processes it has.
        operator: The operator.
        calls: How often it was called.
        bytes_in: The bytes that this process gave, altogether.
        bytes_out: The bytes that this process was given, altogether.
        phase: When they were called, such as `construction` or `step 1`; empty for all of a run. For
            `step 1 to 3, each` the numbers are those of one of these steps.
    """

    group: str
    group_size: int
    operator: str
    calls: int
    bytes_in: int
    bytes_out: int
    phase: str = ""


def summarize(collectives: Iterable[Collective]) -> list[GroupSummary]:
    """Sums up by group and operator, the most bytes first."""
    by_kind: dict[tuple[str, tuple[int, ...], str], list[Collective]] = {}
    for one in collectives:
        by_kind.setdefault((one.group, one.ranks, one.operator), []).append(one)
    rows = [_sum_up(alike) for alike in by_kind.values()]
    return sorted(rows, key=lambda row: (-max(row.bytes_in, row.bytes_out), row.group, row.operator))


def _sum_up(alike: Sequence[Collective]) -> GroupSummary:
    first = alike[0]
    return GroupSummary(
        group=first.group,
        group_size=first.group_size,
        operator=first.operator,
        calls=len(alike),
        bytes_in=sum(one.bytes_in for one in alike),
        bytes_out=sum(one.bytes_out for one in alike),
    )


def summarize_phases(collectives: Sequence[Collective], phases: Iterable[Phase]) -> list[GroupSummary]:
    """Sums up each phase. Successive steps that communicate alike have one summary, with the numbers of one step."""
    groups: list[tuple[str, str, list[GroupSummary]]] = []
    for name, begin, end in phases:
        rows = summarize(collectives[begin:end])
        is_alike = bool(groups) and rows == groups[-1][2] and _kind(name) == _kind(groups[-1][0])
        groups[-1:] = [(groups[-1][0], name, rows)] if is_alike else [*groups[-1:], (name, name, rows)]
    return [replace(row, phase=_span(first, last)) for first, last, rows in groups for row in rows]


def _kind(phase: str) -> str:
    return phase.rpartition(" ")[0]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last.rpartition(' ')[2]}, each"


def peers_of(collectives: Iterable[Collective]) -> list[int]:
    """Returns the global ranks with which messages were exchanged, in ascending order."""
    messages = (one for one in collectives if one.operator.startswith(("send", "recv")) and one.peer is not None)
    return sorted({one.ranks[one.peer] for one in messages if one.peer is not None})
