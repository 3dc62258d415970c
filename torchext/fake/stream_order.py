"""What work of the streams of fake devices is ordered: by streams that wait for events, as on a GPU.

Nothing runs on the streams. The core counts the operators that a program has issued on each; a clock says how many of
each stream are done before something else begins.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import _C

__all__ = ["Clock", "StreamKey", "clock_of", "clock_of_device", "listeners", "order_after", "order_program_after"]

STREAMS = 32  # of a device, as in csrc/fake/cuda/streams.cpp, besides the default one

StreamKey = tuple[int, int]
"""The index of a device, and the number of a stream."""

Clock = dict[StreamKey, int]
"""For each stream, how many of its operators are done."""

_known: dict[StreamKey, Clock] = {}
_of_program: Clock = {}

# Called with the stream that waits, and what it has waited for.
listeners: list[Callable[[StreamKey, Clock], None]] = []


def clock_of(stream: StreamKey) -> Clock:
    """Returns what is done when all is done that has been issued on `stream` until now."""
    return {**_known.get(stream, _of_program), stream: _C.work_on_fake_stream(*stream)}


def clock_of_device(index: int) -> Clock:
    """Returns what is done when all is done that has been issued on the device `index`."""
    return {stream: _C.work_on_fake_stream(*stream) for stream in [(index, number) for number in range(STREAMS + 1)]}


def order_after(stream: StreamKey, clock: Clock) -> None:
    """What is issued on `stream` from now on begins after `clock`."""
    _advance(_known.setdefault(stream, dict(_of_program)), clock)
    for listener in listeners:
        listener(stream, clock)


def order_program_after(clock: Clock, stream: StreamKey) -> None:
    """What the program issues from now on, on any stream, begins after `clock`; `stream` is that which it uses now."""
    _advance(_of_program, clock)
    for known in _known.values():
        _advance(known, clock)
    order_after(stream, clock)


def _advance(clock: Clock, later: Clock) -> None:
    for stream, count in later.items():
        clock[stream] = max(clock.get(stream, 0), count)
