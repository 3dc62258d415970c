"""The records of collectives, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from ..internals.document import Column, Items, Part, Table
from ..internals.text import in_units

__all__ = [
    "Collective",
    "CollectiveSummary",
    "GroupSummary",
    "Phase",
    "Place",
    "peers_of",
    "summarize",
    "summarize_phases",
]

Phase = tuple[str, int, int]
"""A name, the number of the first collective, and the number after the last one."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective, or of a send or receive.

    Attributes:
        operator: The name of the `c10d` operator, such as `_allgather_base_`, without leading and trailing underscores.
        group: The name of the process group: `world`, the name of a device mesh dimension, or PyTorch's name.
        ranks: The global ranks of the group.
        backend: The backend of the group, as the program names it.
        bytes_sent: The bytes of the tensors that this rank passes to the collective.
        bytes_received: The bytes of the tensors that the collective writes on this rank.
        dtype: The dtype of the tensors, such as `torch.bfloat16`; "mixed" if there are several.
        reduction: `SUM`, `AVG` and so on, or an empty string.
        peer: The rank within the group of the other side of a send or receive, or of the root; otherwise None.
        device: The device of the tensors.
        stream: The number of the current stream; 0 is the default stream of the device.
        is_async: Whether the call returned without waiting.
        issued_in: The module that was running, by its name in the model or by its class, and the phase: `forward`,
            `backward`, `optimizer` or an empty string.
        waited_in: The place where the program, or a stream, waited for the collective; None if neither did.
        line: The source line of the call, `file:line in function`; empty unless lines are recorded.
        overlap: The number of operators that a GPU may run at the same time: those issued on the waiting stream, after
            the last operator that the collective itself waits for.
        overlaps_with: The places that issued these operators.
        bytes_kept: For an all-to-all, the bytes that the rank sends to itself.
    """

    operator: str
    group: str
    ranks: tuple[int, ...]
    backend: str
    bytes_sent: int
    bytes_received: int
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
    bytes_kept: int = 0

    @property
    def group_size(self) -> int:
        """The number of ranks of the group."""
        return len(self.ranks)

    @property
    def overlaps(self) -> bool:
        """Whether other work may run at the same time.

        On a GPU, operators that need not wait for the collective; elsewhere, code in another module or phase that runs
        before the program waits.
        """
        return self.overlap > 0 or (self.is_async and self.waited_in != self.issued_in)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as builtin types, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Place:
    """A place in a run.

    Attributes:
        module: The module that was running; empty outside of modules.
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
        group_size: The number of ranks of the group.
        operator: The operator.
        calls: The number of calls.
        bytes_sent: The sum of `Collective.bytes_sent`.
        bytes_received: The sum of `Collective.bytes_received`.
        phase: The phase of the run, such as `construction` or `step 1`; empty for a whole run. The numbers of
            `step 1 to 3, each` are those of one of these steps.
    """

    group: str
    group_size: int
    operator: str
    calls: int
    bytes_sent: int
    bytes_received: int
    phase: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as builtin types, for JSON."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class CollectiveSummary(Items[GroupSummary]):
    """The sums of `World.summary()`: a sequence that prints as a table."""

    rows: tuple[GroupSummary, ...]

    def _parts(self) -> list[Part]:
        columns = ("group", "ranks", "operator", "calls", Column("sent", in_units), Column("received", in_units))
        rows = [astuple(row)[:6] for row in self]
        return [Table(columns, rows)]


def summarize(collectives: Iterable[Collective]) -> list[GroupSummary]:
    """Return the sums by group and operator, the most bytes first."""
    by_kind: dict[tuple[str, tuple[int, ...], str], list[Collective]] = {}
    for one in collectives:
        by_kind.setdefault((one.group, one.ranks, one.operator), []).append(one)
    rows = [_sum_up(alike) for alike in by_kind.values()]
    return sorted(rows, key=lambda row: (-max(row.bytes_sent, row.bytes_received), row.group, row.operator))


def _sum_up(alike: Sequence[Collective]) -> GroupSummary:
    first = alike[0]
    return GroupSummary(
        group=first.group,
        group_size=first.group_size,
        operator=first.operator,
        calls=len(alike),
        bytes_sent=sum(one.bytes_sent for one in alike),
        bytes_received=sum(one.bytes_received for one in alike),
    )


def summarize_phases(collectives: Sequence[Collective], phases: Iterable[Phase]) -> list[GroupSummary]:
    """Return the sums of each phase. Successive steps with equal sums share one row, with the numbers of one step."""
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
    """Return the global ranks with which messages were exchanged, in ascending order."""
    messages = (one for one in collectives if one.operator.startswith(("send", "recv")) and one.peer is not None)
    return sorted({one.ranks[one.peer] for one in messages if one.peer is not None})
