"""The operators that may run on a GPU while a collective runs.

A collective begins when the work that its stream waits for is done. It must be complete when the default stream, on
which programs compute, waits for its stream, or when the caller waits for its handle (`Work.wait()`). Operators that
are issued in between on the waiting stream may run at the same time. So FSDP overlaps the all-gather of a layer with
the layer before, although the program calls and waits in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _C
from ..fake.cuda.stream_order import Clock, StreamKey, clock_of, listeners
from .collectives import Collective, Place

__all__ = ["Overlaps"]

DEFAULT = 0  # the number of the stream

OnOverlap = Callable[[int, int, tuple[Place, ...]], None]


@dataclass(frozen=True)
class _Running:
    """A collective that no other stream has waited for yet.

    Attributes:
        number: The number of the collective.
        begins_after: The work that is done when it begins.
        stream: The stream on which it was called.
        position: The number of operators issued on that stream, including it; None if it has a handle to wait for.
    """

    number: int
    begins_after: Clock
    stream: StreamKey
    position: int | None


class Overlaps:
    """Tracks collectives from the call to the wait.

    Args:
        on_overlap: Called when a stream waits for a collective, with its number, the number of operators that may run
            at the same time, and the places that issued them.
    """

    def __init__(self, on_overlap: OnOverlap) -> None:
        self._on_overlap = on_overlap
        self._running: dict[int, _Running] = {}
        # The places of the program, each with the number of operators that had been issued on the stream.
        self._places: dict[StreamKey, list[tuple[int, Place]]] = {}
        listeners.append(self._wait_by_event)

    def close(self) -> None:
        """Stop tracking."""
        listeners.remove(self._wait_by_event)

    def issue(self, number: int, collective: Collective) -> None:
        """Begin to track a collective that is called."""
        device = torch.device(collective.device)
        if device.type != "cuda" or device.index is None:
            return
        stream = (device.index, collective.stream)
        begins_after = clock_of(stream)
        for key in {stream, (device.index, DEFAULT)}:
            self._places.setdefault(key, []).append((_C.work_on_fake_stream(*key), collective.issued_in))
        if not collective.is_async and collective.stream == DEFAULT:
            return  # later operators of that stream run after it
        position = None
        if not collective.is_async:
            _C.count_work_on_fake_stream(device.index)
            position = _C.work_on_fake_stream(*stream)
        self._running[number] = _Running(number, begins_after, stream, position)

    def wait(self, number: int) -> None:
        """End a collective whose handle the program waits for."""
        running = self._running.get(number)
        if running is not None and running.position is None:
            index = running.stream[0]
            self._end(running, (index, _C.current_fake_stream(index)))

    def _wait_by_event(self, stream: StreamKey, clock: Clock) -> None:
        if stream[1] != DEFAULT:
            return
        for running in list(self._running.values()):
            if running.position is not None and clock.get(running.stream, 0) >= running.position:
                self._end(running, stream)

    def _end(self, running: _Running, stream: StreamKey) -> None:
        del self._running[running.number]
        begin = running.begins_after.get(stream, 0)
        operators = _C.work_on_fake_stream(*stream) - begin
        if operators > 0:
            self._on_overlap(running.number, operators, self._places_since(stream, begin))

    def _places_since(self, stream: StreamKey, begin: int) -> tuple[Place, ...]:
        """Return the places that issued operators on `stream` after the first `begin` operators."""
        marks = self._places.get(stream, [])
        found: dict[Place, None] = {}
        end = _C.work_on_fake_stream(*stream)
        for count, place in reversed(marks):
            if count < end:
                found[place] = None
            if count <= begin:
                break
            end = min(end, count)
        return tuple(reversed(found))
