"""The recorded allocations and frees, their purposes, the states at a moment, and snapshots of them.

The core returns columns of numbers. A timeline has up to a million events, so that most passes over a column run in C.
"""

from __future__ import annotations

import html
import json
import pickle
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from itertools import accumulate, compress
from operator import neg
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..internals.document import Column, Part, Table, as_html, as_text
from ..internals.text import in_units, source_line

if TYPE_CHECKING:
    from .. import _C

__all__ = [
    "PINNED",
    "Action",
    "Allocation",
    "Category",
    "History",
    "MemoryState",
    "Phase",
    "Timeline",
    "curve_of",
    "html_report",
    "in_units",
    "page_of",
    "plot",
    "report",
    "save_snapshot",
    "table_of_categories",
    "table_of_tensors",
]

# ---- The purposes of memory


PINNED = "pinned"  # names pinned memory of the host, in place of a device


class Category(IntEnum):
    """The purpose of an allocation, as in `MemoryCategory` (csrc/extensions/memory/timeline.h).

    An allocation with several purposes counts for the last of them in this list.
    """

    TEMPORARY = 0
    """A result that is not kept for the backward pass."""
    ACTIVATION = 1
    """Made by a module, and alive when a backward pass begins."""
    INPUT = 2
    """Made outside of modules, backward passes and optimizers, such as a batch."""
    COMMUNICATION = 3
    """Made by collectives or for them, or a flat buffer that is passed to one."""
    WORKSPACE = 4
    """Allocated by a kernel besides its results."""
    GRADIENT = 5
    """Gradients of parameters, and buffers to which a backward pass adds gradients."""
    OPTIMIZER_STATE = 6
    PARAMETER = 7
    """Parameters and buffers of modules, also those that a sharded module has gathered."""
    CACHE = 8
    """Carried from one forward pass of a module to the next without gradients, such as keys and values."""

    @property
    def label(self) -> str:
        """The name in reports."""
        return LABELS[self]


LABELS = {
    Category.TEMPORARY: "temporaries",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    Category.COMMUNICATION: "communication",
    Category.WORKSPACE: "workspaces",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.PARAMETER: "parameters",
    Category.CACHE: "caches",
}


class Phase(IntEnum):
    """The phase of the program, as in `MemoryPhase`."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3


# ---- Queries


HOST = {-1: "cpu", -2: PINNED}  # by the number of the place; those of CUDA devices are their indices


class Allocations(NamedTuple):
    """The columns of the allocations, in the order of `AllocationRecord` (csrc/extensions/memory/timeline.h)."""

    place: array[int]
    requested: array[int]
    size: array[int]
    operator: array[int]  # a key of `Timeline.operators`
    scope: array[int]
    line: array[int]  # an index of `Timeline.lines`
    phase: array[int]
    category: array[int]
    address: array[int]
    stream: array[int]
    born: array[int]
    died: array[int]


class Events(NamedTuple):
    """The columns of the events. The change is the number `n` of an allocation, or `~n` for its free."""

    change: array[int]
    reserved: array[int]
    time: array[int]


class Timeline:
    """A copy of the records of the core.

    Attributes:
        version: The version that was copied.
        allocations: The columns of the allocations, in the order of their numbers.
        events: The columns of the events.
        operators: The names of the operators.
        lines: The source lines. The last one is empty.
        places: The numbers of the devices, and of the memory of the host, by name.
    """

    def __init__(self, recorder: _C.MemoryTimeline) -> None:
        self.version: int = recorder.version()
        allocations, events, operators, texts = recorder.data()
        self.operators: dict[int, str] = operators
        self.allocations: Allocations = Allocations(*_columns(allocations, len(Allocations._fields)))
        self.events: Events = Events(*_columns(events, len(Events._fields)))
        self.lines: list[str] = [*texts, ""]
        self.places: dict[str, int] = {HOST.get(n) or f"cuda:{n}": n for n in dict.fromkeys(self.allocations.place)}
        self._histories: dict[str, History] = {}

    def history(self, place: str) -> History:
        """Return the states of a place."""
        if place not in self._histories:
            self._histories[place] = History(self, self.places[place])
        return self._histories[place]


class History:
    """The states of a place.

    State `i` follows `i` changes. The first changes are the allocations from before the timeline, whose event is -1.

    Attributes:
        events: The number of the event before each state.
        times: Its time, in nanoseconds.
        allocated: The allocated bytes in each state.
        reserved: The reserved bytes in each state.
    """

    def __init__(self, timeline: Timeline, place: int) -> None:
        allocations, events = timeline.allocations, timeline.events
        is_here = [number == place for number in map(_by_change(allocations.place).__getitem__, events.change)]
        earlier = [n for n, born in enumerate(allocations.born) if born < 0 and allocations.place[n] == place]
        self._first = len(earlier)

        def column(before: int, values: Iterable[int]) -> array[int]:
            return array("q", [before] * (self._first + 1)) + array("q", compress(values, is_here))

        self._changes = array("q", earlier) + array("q", compress(events.change, is_here))
        self._categories = _by_change(allocations.category)
        self._lines = _by_change(allocations.line)
        self._bytes = allocations.size + array("q", map(neg, reversed(allocations.size)))
        self.allocated: array[int] = array("q", accumulate(map(self._bytes.__getitem__, self._changes), initial=0))
        # Only the first event reports the bytes reserved before it.
        self.reserved: array[int] = column(self.allocated[self._first], events.reserved)
        self.events: array[int] = column(-1, range(len(events.change)))
        self.times: array[int] = column(0, events.time)

    def after(self, event: int) -> int:
        """Return the state after an event."""
        return max(bisect_right(self.events, event) - 1, self._first)

    def peak(self, begin: int, end: int, bytes_in: array[int]) -> int:
        """Return the first state with the most bytes, among those after the events of a range and the one before it.

        Args:
            begin: The first event.
            end: The event after the last.
            bytes_in: `allocated` or `reserved`.
        """
        first, last = self._range(begin, end)
        return _highest(bytes_in, first, last)

    def curve(self, begin: int, end: int, count: int) -> Iterator[int]:
        """Return the state before a range, and those with the most allocated bytes in about `count` parts of it."""
        length = max(1, (end - begin) // max(count, 1))
        first, last = self._range(begin, end)
        yield first
        first += 1
        while first < last:
            part = (self.events[first] - begin) // length + 1
            following = bisect_left(self.events, begin + part * length, first, last)
            yield _highest(self.allocated, first, following)
            first = following

    def replay(self, states: Iterable[int]) -> Iterator[tuple[list[int], Iterable[int]]]:
        """Return the bytes by category and the numbers of the live allocations in each of `states`, which ascend.

        Both are valid until the next state.
        """
        by_category = [0] * len(Category)
        alive: dict[int, None] = {}
        current = 0
        for state in states:
            for change in self._changes[current:state]:
                by_category[self._categories[change]] += self._bytes[change]
                if change >= 0:
                    alive[change] = None
                else:
                    del alive[~change]
            current = state
            yield by_category, alive

    def alive(self, events: Iterable[int]) -> Iterator[list[int]]:
        """Return the numbers of the allocations that were alive after each of `events`, which ascend, by size."""
        states = (max(bisect_right(self.events, event) - 1, 0) for event in events)
        for _, alive in self.replay(states):
            yield sorted(alive, key=self._bytes.__getitem__, reverse=True)

    def peak_of_lines(self, begin: int, end: int) -> dict[int, int]:
        """Return the most bytes that each line held at a moment of a range, by the number of the line."""
        first, last = self._range(begin, end)
        held: dict[int, int] = {}
        for _, alive in self.replay([first]):
            for number in alive:
                line = self._lines[number]
                held[line] = held.get(line, 0) + self._bytes[number]
        peaks = dict(held)
        for change in self._changes[first : last - 1]:
            line = self._lines[change]
            held[line] = nbytes = held.get(line, 0) + self._bytes[change]
            if nbytes > peaks.get(line, -1):
                peaks[line] = nbytes
        return peaks

    def _range(self, begin: int, end: int) -> tuple[int, int]:
        """Return the state before some events, and the one after the state after them."""
        return bisect_left(self.events, begin) - 1, bisect_left(self.events, end)


def _columns(rows: bytes, count: int) -> Iterator[array[int]]:
    numbers = array("q", rows)
    return (numbers[i::count] for i in range(count))


def _by_change(column: array[int]) -> array[int]:
    """Return a table whose index `~n`, which counts from the end, refers to the same number as `n`."""
    return column + column[::-1]


def _highest(column: array[int], first: int, last: int) -> int:
    return column.index(max(column[first:last]), first)


# ---- The allocations at a moment, and their holders


@dataclass(frozen=True)
class Allocation:
    """One allocation.

    Attributes:
        size: The bytes that it occupies on its device, as PyTorch's allocator counts them.
        requested: The requested bytes.
        category: Its purpose.
        phase: The phase of the program that made it.
        operator: The operator that made it, such as `aten::mm`.
        module: The qualified name of the module whose forward or backward pass made it; empty outside of modules.
        line: The source line, if lines are recorded.
        owner: The name of the parameter that it is, or whose gradient or state it is; empty for others.
        born: The number of the event that allocated it; -1 before the tracker.
        died: The number of the event that freed it; -1 if it is alive.
    """

    size: int
    requested: int
    category: Category
    phase: Phase
    operator: str
    module: str
    line: str
    owner: str
    born: int
    died: int

    @property
    def holder(self) -> str:
        """The module that holds it."""
        return self.owner.rpartition(".")[0] if self.owner else self.module

    @property
    def title(self) -> str:
        """Its name in a list."""
        return self.owner or " ".join(filter(None, (self.module, self.operator)))


@dataclass(frozen=True)
class MemoryState:
    """The memory of a device after an event.

    Attributes:
        device: The device, such as `cuda:0`, or `pinned` for pinned memory of the host.
        event: The number of the event, counted from the beginning of the tracker; -1 before the first.
        seconds: The time since the first event.
        allocated: The bytes in use, as `torch.cuda.memory_allocated()` counts them.
        reserved: The bytes that PyTorch has reserved on the device, as `torch.cuda.memory_reserved()` counts them.
            Equal to `allocated` on devices without a caching allocator. Pinned memory is reserved in powers of two,
            and kept.
        by_category: The bytes in use for each purpose.
    """

    device: str
    event: int
    seconds: float
    allocated: int
    reserved: int
    by_category: Mapping[Category, int]

    @property
    def fragmentation(self) -> int:
        """The bytes that are reserved but not in use."""
        return self.reserved - self.allocated


def summed(allocations: list[Allocation], key: Callable[[Allocation], str]) -> dict[str, int]:
    """Return the sums of sizes by `key`, the largest first."""
    sums: dict[str, int] = {}
    for allocation in allocations:
        name = key(allocation)
        sums[name] = sums.get(name, 0) + allocation.size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# ---- Snapshots for PyTorch's memory viewer


class Action(NamedTuple):
    """An allocation or a free.

    Attributes:
        device: The index of the CUDA device.
        is_allocation: True for an allocation.
        address: The address of the memory.
        stream: The stream of the allocation.
        time_ns: The time in nanoseconds.
        allocation: The allocation.
    """

    device: int
    is_allocation: bool
    address: int
    stream: int
    time_ns: int
    allocation: Allocation


def save_snapshot(path: Path, actions: Iterable[Action], segments: list[dict[str, Any]]) -> None:
    """Write the actions of each device and the segments, as `torch.cuda.memory._dump_snapshot()` does."""
    traces: list[list[dict[str, Any]]] = []
    for action in actions:
        while len(traces) <= action.device:
            traces.append([])
        traces[action.device].extend(_entries(action))
    snapshot = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


def _entries(action: Action) -> Iterator[dict[str, Any]]:
    for name in ["alloc"] if action.is_allocation else ["free_requested", "free_completed"]:
        yield {
            "action": name,
            "addr": action.address,
            "size": action.allocation.requested,
            "stream": action.stream,
            "time_us": action.time_ns // 1000,
            "frames": _frames(action.allocation),
            "category": action.allocation.category.label,
        }


def _frames(allocation: Allocation) -> list[dict[str, Any]]:
    """Return the category, owner, operator and module of an allocation, in place of the stack that PyTorch records."""
    described = [(allocation.category.label, allocation.owner), (allocation.operator, allocation.module)]
    frames = [{"filename": text, "line": 0, "name": name} for name, text in described if text]
    if allocation.line:
        line = source_line(allocation.line)
        frames.append({"filename": line.file, "line": line.number, "name": line.function})
    return frames


# ---- Reports and plots of memory


# ---- Memory reports


def report(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> str:
    """Return the peak of a device by category and module, with the `largest` tensors, as text.

    Args:
        peak: The state with the most allocated bytes.
        reserved: The peak of the reserved bytes.
        allocations: The allocations alive at the peak, the largest first.
        largest: The number of modules and tensors to list.
    """
    return as_text(_document(peak, reserved, allocations, largest))


def html_report(peak: MemoryState, reserved: int, allocations: list[Allocation]) -> str:
    """Return the same as HTML, with 10 modules and tensors."""
    return as_html(_document(peak, reserved, allocations, 10))


def _document(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> Iterator[Part]:
    yield f"Peak memory of {peak.device}: {in_units(peak.allocated)} allocated, {in_units(reserved)} reserved"
    by_category = {category.label: nbytes for category, nbytes in peak.by_category.items() if nbytes}
    yield table_of_categories(by_category, peak.allocated, peak.fragmentation)
    sums, total = summed(allocations, lambda allocation: allocation.holder), max(peak.allocated, 1)
    modules = [(nbytes, 100 * nbytes / total, name or "(outside of modules)") for name, nbytes in sums.items()]
    yield Table((*SHARES, "module"), modules[:largest], "By module")
    tensors = [(one.size, one.category.label, one.title, one.line or None) for one in allocations[:largest]]
    yield table_of_tensors(tensors, "Largest tensors")


SHARES = Column("bytes", in_units), Column("share", "{:.1f} %".format)


def table_of_categories(sums: Mapping[str, int], total: int, fragmentation: int, title: str = "") -> Table:
    """Return the bytes of each category, the most first, and their shares of the allocated bytes."""
    rows = [(name, nbytes, 100 * nbytes / max(total, 1)) for name, nbytes in sums.items()]
    rows.sort(key=lambda row: -row[1])
    return Table(("category", *SHARES), [*rows, ("fragmentation", fragmentation, None)], title)


def table_of_tensors(rows: Iterable[tuple[int, str, str, str | None]], title: str) -> Table:
    """Return a table of the bytes, the category, the name and the source line of tensors."""
    return Table((SHARES[0], "category", "name", Column("line", is_optional=True)), rows, title)


# ---- Plots of memory over time


# From the bottom up: constant memory first, the most variable on top.
COLORS = {
    Category.PARAMETER: "#4477aa",
    Category.OPTIMIZER_STATE: "#228833",
    Category.GRADIENT: "#66ccee",
    Category.COMMUNICATION: "#aa3377",
    Category.INPUT: "#bbbbbb",
    Category.ACTIVATION: "#ee6677",
    Category.TEMPORARY: "#ccbb44",
    Category.WORKSPACE: "#555555",
}
ORDER = list(COLORS)

UNUSED = "not in use"
COLOR_OF_UNUSED = "#eeeeee"

DETAILED = 120  # the number of moments with a list of holders
LARGEST = 12  # the number of holders in it

AllocationsAt: TypeAlias = Callable[[list[int]], Iterable[list[Allocation]]]


def plot(path: Path, states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> None:
    """Plot into `path`, in the format of its suffix.

    Args:
        path: The file.
        states: The curve.
        peak: The state with the most allocated bytes.
        allocations_at: Returns the `LARGEST` allocations alive after each of some events, the largest first.
    """
    if path.suffix == ".html":
        path.write_text(page_of(curve_of(states, peak, allocations_at)), encoding="utf-8")
    elif path.suffix in (".svg", ".png"):
        _draw(path, states)
    else:
        raise ValueError(f"`path`: expected a name that ends with .html, .svg or .png, got {str(path)!r}.")


def _draw(path: Path, states: list[MemoryState]) -> None:
    try:
        from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"Drawing {path.name} needs matplotlib (`pip install matplotlib`); a name that ends with .html does not."
        ) from error
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    used = [category for category in ORDER if any(state.by_category[category] for state in states)]
    gib = 2**30
    axes.stackplot(
        [state.event for state in states],
        [
            *([state.by_category[category] / gib for state in states] for category in used),
            [state.fragmentation / gib for state in states],
        ],
        labels=[*(category.label for category in used), UNUSED],
        colors=[*(COLORS[category] for category in used), COLOR_OF_UNUSED],
        step="post",
    )
    axes.plot(
        [state.event for state in states], [state.reserved / gib for state in states], "k--", lw=0.8, label="reserved"
    )
    axes.set_xlabel("allocations and frees")
    axes.set_ylabel(f"GiB on {states[0].device}")
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize="small")
    # Equal plots are equal files.
    with rc_context({"svg.hashsalt": "torchext", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def page_of(curve: Mapping[str, Any]) -> str:
    """Return a self-contained HTML report: the curve, and the holders of memory at the moment under the cursor.

    Args:
        curve: The result of `curve_of()`.
    """
    text = json.dumps(curve, sort_keys=True, separators=(",", ":")).replace("</", "<\\/")
    title = f"Memory of {curve['device']}: {in_units(curve['peak_allocated'])} at the peak"
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("@TITLE@", html.escape(title)).replace("@DATA@", text)


def curve_of(states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> dict[str, Any]:
    """Return the data of the HTML report, as values that `json.dumps()` takes. The arguments are those of `plot()`."""
    return {
        "device": peak.device,
        "peak_allocated": peak.allocated,
        "categories": [
            *({"name": category.label, "color": COLORS[category]} for category in ORDER),
            {"name": UNUSED, "color": COLOR_OF_UNUSED},
        ],
        "points": [_point(state) for state in states],
        "seconds": [round(state.seconds, 6) for state in states],
        "details": _details(states, peak, allocations_at),
    }


def _point(state: MemoryState) -> list[int]:
    used = [state.by_category[category] for category in ORDER]
    return [state.event, state.reserved, *used, state.fragmentation]


def _details(states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> dict[str, Any]:
    """Return the largest holders at the peak, and at moments spread over the curve."""
    stride = max(1, len(states) // DETAILED)
    events = sorted({peak.event, *(state.event for state in states[::stride])})
    details = {}
    for event, allocations in zip(events, allocations_at(events), strict=True):
        details[str(event)] = [
            [allocation.size, allocation.category.label, allocation.title, allocation.line]
            for allocation in allocations
        ]
    return {"peak": peak.event, "at": details}
