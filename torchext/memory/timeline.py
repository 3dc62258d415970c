"""Queries of the recorded allocations and frees.

The core returns columns of numbers. A timeline has up to a million events, so that most passes over a column run in C.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, compress
from operator import neg
from typing import NamedTuple

from .. import _C
from .categories import PINNED, Category

__all__ = ["History", "Timeline"]

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
        self.version = recorder.version()
        allocations, events, self.operators, texts = recorder.data()
        self.allocations = Allocations(*_columns(allocations, len(Allocations._fields)))
        self.events = Events(*_columns(events, len(Events._fields)))
        self.lines = [*texts, ""]
        self.places = {HOST.get(n) or f"cuda:{n}": n for n in dict.fromkeys(self.allocations.place)}
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
        self.allocated = array("q", accumulate(map(self._bytes.__getitem__, self._changes), initial=0))
        # Only the first event reports the bytes reserved before it.
        self.reserved = column(self.allocated[self._first], events.reserved)
        self.events = column(-1, range(len(events.change)))
        self.times = column(0, events.time)

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
