"""What may run on a GPU while a collective does.

A collective begins when the streams for which its own has waited are there. It has to be done when the default stream,
on which programs compute, waits for its stream, or whoever called it for its handle (`Work.wait()`). What was issued in
between on the stream that waits, runs meanwhile. So FSDP overlaps the gathering of a layer with the layer before,
although the program calls and waits in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _C
from ..fake.stream_order import Clock, StreamKey, clock_of, listeners
from .collectives import Collective, Place

__all__ = ["Overlaps"]

DEFAULT = 0  # the number of the stream

OnOverlap = Callable[[int, int, tuple[Place, ...]], None]


@dataclass(frozen=True)
class _Running:
    """A collective for which no other stream has waited yet.

    Attributes:
        number: Of the collective.
        begins_after: What is done when it begins.
        stream: On which it was called.
        position: How many operators had been issued there with it; None if it has a handle to wait by.
    """

    number: int
    begins_after: Clock
    stream: StreamKey
    position: int | None


class Overlaps:
    """Follows collectives from the call to the wait.

    Args:
        on_overlap: Is called when a stream waits for a collective, with its number, how many operators may run
            meanwhile, and where they were issued.
    """

    def __init__(self, on_overlap: OnOverlap) -> None:
        self._on_overlap = on_overlap
        self._running: dict[int, _Running] = {}
        # Where the program stood, and how many operators had been issued on the stream then.
        self._places: dict[StreamKey, list[tuple[int, Place]]] = {}
        listeners.append(self._wait_by_event)

    def close(self) -> None:
        """Follows no more."""
        listeners.remove(self._wait_by_event)

    def issue(self, number: int, collective: Collective) -> None:
        """A collective is called."""
        device = torch.device(collective.device)
        if device.type != "cuda" or device.index is None:
            return
        stream = (device.index, collective.stream)
        begins_after = clock_of(stream)
        for key in {stream, (device.index, DEFAULT)}:
            self._places.setdefault(key, []).append((_C.work_on_fake_stream(*key), collective.issued_in))
        if not collective.is_async and collective.stream == DEFAULT:
            return  # what is issued there later comes after it
        position = None
        if not collective.is_async:
            _C.count_work_on_fake_stream(device.index)
            position = _C.work_on_fake_stream(*stream)
        self._running[number] = _Running(number, begins_after, stream, position)

    def wait(self, number: int) -> None:
        """The program waits for a collective by its handle."""
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
        """Where the operators were issued that `stream` has got since it had got `begin`."""
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
