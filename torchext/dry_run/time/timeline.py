"""The least time of a sequence of operators and collectives on streams.

An operator starts after the operators that were issued before it on its stream, and after the work that its stream
waits for. A collective starts after the work of the stream on which it is called, and after the collectives that its
group has started before. All durations are lower bounds, and so is the end of the last operator.

Steps may overlap: a side stream can still run while the next step begins on the main stream. So only paths that begin
and end on one stream bound the time between two steps. Work on another stream counts from where that stream waits for
the first one. The longest path of a stream is the bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from ...fake.cuda.stream_order import Clock, StreamKey

__all__ = ["Event", "Finish", "Issue", "Run", "Wait", "least_time"]


class Run(NamedTuple):
    """An operator, or a collective on the stream on which it is called.

    `position` is the number of operators issued on the stream, including it.
    """

    stream: StreamKey
    position: int
    seconds: float


class Wait(NamedTuple):
    """A stream waits for the work that `clock` counts."""

    stream: StreamKey
    clock: Clock


class Issue(NamedTuple):
    """A collective begins on its own stream. Those with the same `chain` run one after the other."""

    stream: StreamKey
    number: int
    seconds: float
    chain: str


class Finish(NamedTuple):
    """A stream waits for a collective."""

    stream: StreamKey
    number: int


Event: TypeAlias = Run | Wait | Issue | Finish

NEVER = float("-inf")


def least_time(events: Iterable[Event]) -> float:
    """Return the least time between two repetitions of the events, in seconds."""
    events = list(events)
    work: dict[StreamKey, float] = defaultdict(float)
    for event in events:
        if isinstance(event, Run):
            work[event.stream] += event.seconds
    return max((max(_path(events, stream), work[stream]) for stream in work), default=0.0)


def _path(events: Iterable[Event], first: StreamKey) -> float:
    """Return the length of the longest path that begins and ends on the stream `first`."""
    now: dict[StreamKey, float] = defaultdict(lambda: NEVER, {first: 0.0})
    ends: dict[StreamKey, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    chains: dict[str, float] = defaultdict(lambda: NEVER)
    finished: dict[int, float] = {}
    for event in events:
        stream = event.stream
        if isinstance(event, Run):
            now[stream] += event.seconds
            positions, times = ends[stream]
            positions.append(event.position)
            times.append(now[stream])
        elif isinstance(event, Wait):
            now[stream] = max([now[stream], *(_end(ends[other], count) for other, count in event.clock.items())])
        elif isinstance(event, Issue):
            finished[event.number] = max(now[stream], chains[event.chain]) + event.seconds
            chains[event.chain] = finished[event.number] if event.chain else NEVER
        else:
            now[stream] = max(now[stream], finished.get(event.number, NEVER))
    return now[first]


def _end(ends: tuple[list[int], list[float]], count: int) -> float:
    """Return the time at which the first `count` operators of a stream are done."""
    index = bisect_right(ends[0], count) - 1
    return ends[1][index] if index >= 0 else NEVER
