"""The differences between two reports: peaks, categories, modules, source lines, collectives and operations.

The key `comparison` of the JSON report is `Comparison.to_dict()`:

    notes: reasons why the runs are not alike, such as another GPU or a rank that only one of the reports has
    ranks: a list, in the order of the runs:
        rank
        devices: a list of device, peak_reserved, peak_allocated, categories, modules, lines, line_peaks
        collectives: bytes sent and received, by phase, group and operator
        flops: a list with at most one entry

Each difference has name, base, head (numbers, 0 if missing), growth (head - base), change ("added", "removed", "grown",
"shrunk" or "equal") and code and is_edited (of a source line). Lists leave out equal numbers. Edited lines that have
grown are first, then the largest change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from ..internals.document import Column, Document, Part, Table, Title, as_markdown
from ..internals.text import bytes_of, in_units, source_line
from .model import USES_NO_GPU
from .text import Report, operations

__all__ = [
    "Comparison",
    "DeviceComparison",
    "Difference",
    "Limit",
    "RankComparison",
    "compare",
]

Numbers: TypeAlias = Mapping[str, int]
Pair: TypeAlias = tuple[str, str]

T = TypeVar("T")


@dataclass(frozen=True)
class Comparison(Document):
    """The differences between two reports. Prints as text.

    Attributes:
        ranks: The ranks that both reports have.
        notes: The reasons why the runs are not alike.
    """

    ranks: tuple[RankComparison, ...]
    notes: tuple[str, ...] = ()

    def exceeds(self, limit: Limit) -> bool:
        """Return true if a peak grew by more than `limit`."""
        return any(limit.is_exceeded_by(peak) for rank in self.ranks for peak in rank.peaks)

    def to_markdown(self) -> str:
        """Return the differences as Markdown, for a comment on a pull request: the peaks, and folded tables."""
        return as_markdown([Title("Peak memory"), *self._parts()])

    def _parts(self) -> Iterator[Part]:
        yield from self.notes
        rows = [
            (rank.rank, device.device, peak.name.removeprefix("peak "), *_numbers(peak), _percent(peak))
            for rank in self.ranks
            for device in rank.devices
            for peak in (device.peak_reserved, device.peak_allocated)
        ]
        columns: list[str | Column] = ["rank", "device", "peak", *_columns(in_units), Column("", "{:+.1f} %".format)]
        yield Table(columns, rows) if any(growth for *_, growth, _ in rows) else "No peak has changed."
        yield from _tables(self.ranks)


@dataclass(frozen=True)
class Limit:
    """The growth of a peak that is accepted.

    Attributes:
        amount: A number of bytes, or of percent of the base.
        is_percent: Whether it is percent.
    """

    amount: float
    is_percent: bool = False

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Return the limit for a text such as `1%` or `100MiB`.

        Raises:
            ValueError: `text` is neither a percentage nor a size.
        """
        percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        try:
            return cls(float(percent[1]), True) if percent else cls(bytes_of(text, "limit"))
        except ValueError:
            raise ValueError(f"expected a percentage such as 1%, or a size such as 100MiB, got {text!r}") from None

    def is_exceeded_by(self, peak: Difference) -> bool:
        """Return true if `peak` grew by more than this."""
        return peak.growth > (peak.base * self.amount / 100 if self.is_percent else self.amount)

    def __str__(self) -> str:
        return f"{self.amount:g} %" if self.is_percent else f"{self.amount:.0f} bytes"


def compare(base: Report, head: Report) -> Comparison:
    """Return the differences between two reports of a program.

    Lines are compared by file, function, code and bytes, so lines below an inserted line are not reported as new. Paths
    are relative to the folders in which the reports were made.

    Args:
        base: The old report.
        head: The new report.

    Raises:
        ValueError: The reports have no rank in common.
    """
    old, new = base.to_dict(), head.to_dict()
    olds = {rank["rank"]: rank for rank in old["ranks"]}
    both = [rank for rank in new["ranks"] if rank["rank"] in olds]
    if not both:
        raise ValueError(f"the reports have no rank in common: the base has {base.ranks}, the new one {head.ranks}")
    folders = old.get("folder", ""), new.get("folder", "")
    compared = tuple(_compare_rank(olds[rank["rank"]], rank, folders) for rank in both)
    return Comparison(compared, tuple(_notes(old, new, olds)))


def _notes(old: dict[str, Any], new: dict[str, Any], olds: dict[int, Any]) -> Iterator[str]:
    for key in ("program", "world_size", "per_node", "values", "gpu", "versions"):
        if old.get(key) != new.get(key):
            yield f"The reports differ in {key}: {_short(old.get(key), new.get(key))}."
    for one, name in ((old, "base"), (new, "new report")):
        if not all(_has_peaks(device) for rank in one["ranks"] for device in rank["devices"]):
            yield f"The {name} has no peaks of lines; make it again."
    for rank in new["ranks"]:
        number = rank["rank"]
        if number not in olds:
            yield f"Rank {number} is not in the base."
            continue
        for one, name in ((olds[number], "base"), (rank, "new report")):
            if one["outcome"] not in ("fits", "does not fit", USES_NO_GPU):
                yield f"Rank {number} did not reach its goal in the {name}, so its peaks may be too small."
        goals = [f"{one['requested'] or 'all'} {one['unit']}" for one in (olds[number], rank)]
        if goals[0] != goals[1]:
            yield f"Rank {number} ran another number of steps or forward passes: {goals[0]} before, {goals[1]} now."
    for number in sorted(olds.keys() - {rank["rank"] for rank in new["ranks"]}):
        yield f"Rank {number} is only in the base."


def _has_peaks(device: Mapping[str, Any]) -> bool:
    """Return false for devices of reports that were made before there were peaks of lines, and code for them."""
    return not device or "line_peaks" in device


def _short(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return ", ".join(f"{key} {old.get(key)} before, {new.get(key)} now" for key in keys)
    old, new = (" ".join(one) if isinstance(one, list) else one for one in (old, new))
    return f"{old} before, {new} now"


def _compare_rank(old: dict[str, Any], new: dict[str, Any], folders: Pair) -> RankComparison:
    def compare_device(name: str) -> DeviceComparison:
        before, after = olds.get(name, {}), news.get(name, {})
        lines = _lines_of(before, old, folders[0]), _lines_of(after, new, folders[1])
        return _compare_device(name, before, after, *lines)

    olds, news = ({device["device"]: device for device in rank["devices"]} for rank in (old, new))
    names = [*news, *(name for name in olds if name not in news)]
    flops = [] if None in (old["flops"], new["flops"]) else [Difference(new["unit"], old["flops"], new["flops"])]
    return RankComparison(
        rank=new["rank"],
        devices=tuple(map(compare_device, names)),
        collectives=_differences(_traffic(old), _traffic(new)),
        flops=_largest_first(flops),
    )


def _traffic(rank: dict[str, Any]) -> Numbers:
    """Return the bytes sent and received, by phase, group and operator."""
    found: dict[str, int] = {}
    for row in rank["collectives"]:
        name = f"{row['phase']}: {row['operator']} in {row['group']}"
        found[name] = found.get(name, 0) + row["bytes_sent"] + row["bytes_received"]
    return found


def _compare_device(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], old_lines: _Lines, new_lines: _Lines
) -> DeviceComparison:
    def compare_lines(olds: Numbers, news: Numbers) -> tuple[Difference, ...]:
        found = (_line_difference(pair, olds, news, old_lines, new_lines) for pair in pairs)
        return _largest_first(found if has_peaks else (replace(one, is_edited=False) for one in found))

    pairs = list(_pairs(old_lines, new_lines))
    has_peaks = _has_peaks(old) and _has_peaks(new)
    return DeviceComparison(
        device=name,
        is_gpu=bool(new.get("total") or old.get("total")),
        peak_reserved=Difference("peak reserved", old.get("peak_reserved", 0), new.get("peak_reserved", 0)),
        peak_allocated=Difference("peak allocated", old.get("peak_allocated", 0), new.get("peak_allocated", 0)),
        categories=_differences(old.get("categories", {}), new.get("categories", {})),
        modules=_differences(old.get("modules", {}), new.get("modules", {})),
        lines=compare_lines(old_lines.nbytes, new_lines.nbytes),
        line_peaks=compare_lines(old_lines.peaks, new_lines.peaks) if has_peaks else (),
    )


def _differences(old: Numbers, new: Numbers) -> tuple[Difference, ...]:
    return _largest_first(Difference(name, old.get(name, 0), new.get(name, 0)) for name in {**old, **new})


def _largest_first(found: Iterable[Difference]) -> tuple[Difference, ...]:
    changed = (one for one in found if one.growth)
    return tuple(sorted(changed, key=lambda one: (not one.is_suspect, -abs(one.growth), one.name, one.base)))


# ---- Source lines


@dataclass(frozen=True)
class _Lines:
    """The source lines of a device, with paths relative to the folder of the report.

    Attributes:
        nbytes: The bytes at the peak of the device, by line.
        peaks: The most bytes that each line held at any moment.
        code: The code of each line.
    """

    nbytes: Numbers
    peaks: Numbers
    code: Mapping[str, str]


def _lines_of(device: Mapping[str, Any], rank: Mapping[str, Any], folder: str) -> _Lines:
    def inside(lines: Mapping[str, T]) -> dict[str, T]:
        return {line.removeprefix(f"{folder.rstrip('/')}/") if folder else line: lines[line] for line in lines}

    nbytes = inside(device.get("lines", {}))
    return _Lines(nbytes, {**nbytes, **inside(device.get("line_peaks", {}))}, inside(rank.get("code", {})))


def _pairs(old: _Lines, new: _Lines) -> Iterator[Pair]:
    """Yield each line of both reports once: its places before and after. One may be empty.

    Lines may have moved within their functions. They are paired in this order: equal lines, lines with equal code,
    lines with equal bytes, lines with equal numbers, and the remaining lines of a function if both reports have as
    many.
    """
    olds, news = dict.fromkeys(old.peaks), dict.fromkeys(new.peaks)

    def pair(key: Callable[[_Lines, str], object], *, is_whole: bool = False) -> Iterator[Pair]:
        groups: dict[object, tuple[list[str], list[str]]] = {}
        for side, (lines, left) in enumerate(((old, olds), (new, news))):
            for line in sorted(left, key=lambda line: (source_line(line).number, line)):
                groups.setdefault((_function(line), key(lines, line)), ([], []))[side].append(line)
        for befores, afters in groups.values():
            if not is_whole or len(befores) == len(afters):
                for before, after in zip(befores, afters, strict=False):
                    del olds[before], news[after]
                    yield before, after

    yield from pair(lambda lines, line: (line, lines.code.get(line), lines.peaks[line]))
    yield from pair(lambda lines, line: (lines.code.get(line) or (line, id(lines)), lines.peaks[line]))
    yield from pair(lambda lines, line: lines.code.get(line) or (line, id(lines)))
    yield from pair(lambda lines, line: lines.peaks[line])
    yield from pair(lambda lines, line: line)
    yield from pair(lambda lines, line: None, is_whole=True)
    yield from ((line, "") for line in olds)
    yield from (("", line) for line in news)


def _line_difference(pair: Pair, olds: Numbers, news: Numbers, old: _Lines, new: _Lines) -> Difference:
    before, after = pair
    code = new.code.get(after, "") if after else old.code.get(before, "")
    is_edited = bool(after and code) and old.code.get(before, "") != code
    return Difference(after or before, olds.get(before, 0), news.get(after, 0), code, is_edited)


def _function(line: str) -> tuple[str, str]:
    place = source_line(line)
    return place.file, place.function


# ---- The differences of numbers, devices and ranks in two reports


@dataclass(frozen=True)
class Difference:
    """A number in two reports.

    Attributes:
        name: The counted thing, such as a category or a source line. A moved line has the place in the new report.
        base: The number in the old report; 0 if it has none.
        head: The number in the new report; 0 if it has none.
        code: The code of a source line.
        is_edited: Whether the code of a source line is not in the old report.
    """

    name: str
    base: int
    head: int
    code: str = ""
    is_edited: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether this is an edited line that holds more than before."""
        return self.is_edited and self.growth > 0

    @property
    def growth(self) -> int:
        """The difference of the numbers; negative if it has shrunk."""
        return self.head - self.base

    @property
    def change(self) -> str:
        """`added`, `removed`, `grown`, `shrunk` or `equal`."""
        if self.growth == 0:
            return "equal"
        if not (self.base and self.head):
            return "removed" if self.base else "added"
        return "grown" if self.growth > 0 else "shrunk"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and properties as builtin types, for JSON."""
        names = ("name", "base", "head", "growth", "change", "code", "is_edited")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DeviceComparison:
    """The differences of one device of a rank. The lists are at the peaks of allocated memory.

    Attributes:
        device: The device.
        is_gpu: Whether it is a GPU, and not memory of the host.
        peak_reserved: The largest number of bytes that PyTorch reserved.
        peak_allocated: The largest number of bytes that were allocated.
        categories: The bytes by category.
        modules: The bytes by module.
        lines: The bytes by source line.
        line_peaks: The most bytes that each source line held at any moment.
    """

    device: str
    is_gpu: bool
    peak_reserved: Difference
    peak_allocated: Difference
    categories: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    lines: tuple[Difference, ...]
    line_peaks: tuple[Difference, ...]


@dataclass(frozen=True)
class RankComparison:
    """The differences of one rank.

    Attributes:
        rank: The rank.
        devices: The devices, GPUs first.
        collectives: The bytes sent and received, by phase, group and operator.
        flops: The operations of a step or forward pass; empty if they are equal or were not counted in both.
    """

    rank: int
    devices: tuple[DeviceComparison, ...]
    collectives: tuple[Difference, ...]
    flops: tuple[Difference, ...]

    @property
    def peaks(self) -> Iterator[Difference]:
        """The peaks that a limit applies to: those of GPUs, or of the host for a rank without GPUs."""
        gpus = [device for device in self.devices if device.is_gpu]
        for device in gpus or self.devices:
            yield from (device.peak_reserved, device.peak_allocated)


# ---- Tables of comparisons


MOST_ROWS = 10


def _columns(units: Callable[[int], str]) -> tuple[Column, ...]:
    signed = Column("growth", lambda number: f"{'+' if number > 0 else ''}{units(number)}")
    return Column("base", units), Column("head", units), signed


def _numbers(one: Difference) -> tuple[int, int, int]:
    return one.base, one.head, one.growth


def _percent(one: Difference) -> float | None:
    return 100 * one.growth / one.base if one.base and one.growth else None


def _tables(ranks: Iterable[RankComparison]) -> Iterator[Table]:
    """Yield tables of the changes, once for ranks that changed alike."""
    alike: list[tuple[RankComparison, list[int]]] = []
    for rank in ranks:
        numbers = next((numbers for one, numbers in alike if replace(one, rank=rank.rank) == rank), None)
        if numbers is None:
            alike.append((rank, numbers := []))
        numbers.append(rank.rank)
    for rank, numbers in alike:
        which = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for device in rank.devices:
            place = f"of {device.device} on {which}"
            kinds = (
                ("category", "at the peak", device.categories),
                ("module", "at the peak", device.modules),
                ("line", "at the peak", device.lines),
                ("line", "at any moment", device.line_peaks),
            )
            for name, moment, found in kinds:
                yield _table(f"By {name} {moment} {place}", name, found)
        yield _table(f"Bytes of collectives on {which}, sent and received", "collective", rank.collectives)
        yield _table(f"Floating-point operations on {which}", "in a", rank.flops, operations)


def _change(one: Difference) -> str:
    return "edited" if one.is_suspect and one.base else one.change


def _table(title: str, name: str, found: Sequence[Difference], units: Callable[[int], str] = in_units) -> Table:
    named = Column(name, is_code=name != "in a"), Column("code", is_optional=True, is_code=True)
    rows = [(_change(one), *_numbers(one), one.name or "(outside of modules)", one.code or None) for one in found]
    if len(rows) > MOST_ROWS:
        title += f" (the largest {MOST_ROWS} of {len(rows)} changes)"
    return Table(["change", *_columns(units), *named], rows[:MOST_ROWS], title)
