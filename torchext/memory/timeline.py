"""The recorded allocations and frees, their purposes, the states at a moment, and snapshots of them.

The core returns columns of numbers. A timeline has up to a million events, so that most passes over a column run in C.
"""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, compress
from operator import neg
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..internals.text import source_line

if TYPE_CHECKING:
    from .. import _C

__all__ = ["PINNED", "Action", "Allocation", "Category", "History", "MemoryState", "Phase", "Timeline", "save_snapshot"]


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
