"""Order of the work on streams of fake devices: streams wait for events, as on a GPU.

Nothing runs on the streams. The core counts the operators that a program has issued on each stream. A clock holds the
number of operators of each stream that complete before other work begins.
"""

from __future__ import annotations

from collections.abc import Callable

from ... import _C

__all__ = ["Clock", "StreamKey", "clock_of", "clock_of_device", "listeners", "order_after", "order_program_after"]

STREAMS = 32  # per device besides the default stream, as in csrc/extensions/cuda/fake_cuda.cpp

StreamKey = tuple[int, int]
"""The index of a device, and the number of a stream."""

Clock = dict[StreamKey, int]
"""For each stream, how many of its operators are done."""

_known: dict[StreamKey, Clock] = {}
_of_program: Clock = {}

# Called with the waiting stream and the clock that it waits for.
listeners: list[Callable[[StreamKey, Clock], None]] = []


def clock_of(stream: StreamKey) -> Clock:
    """Return the clock at which all work issued on `stream` so far is done."""
    return {**_known.get(stream, _of_program), stream: _C.work_on_fake_stream(*stream)}


def clock_of_device(index: int) -> Clock:
    """Return the clock at which all work issued on the device `index` so far is done."""
    return {stream: _C.work_on_fake_stream(*stream) for stream in [(index, number) for number in range(STREAMS + 1)]}


def order_after(stream: StreamKey, clock: Clock) -> None:
    """Let later work on `stream` begin after `clock`."""
    _advance(_known.setdefault(stream, dict(_of_program)), clock)
    for listener in listeners:
        listener(stream, clock)


def order_program_after(clock: Clock, stream: StreamKey) -> None:
    """Let later work of the program, on any stream, begin after `clock`. `stream` is its current stream."""
    _advance(_of_program, clock)
    for known in _known.values():
        _advance(known, clock)
    order_after(stream, clock)


def _advance(clock: Clock, later: Clock) -> None:
    for stream, count in later.items():
        clock[stream] = max(clock.get(stream, 0), count)
