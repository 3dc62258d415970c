"""Streams and events of fake CUDA devices.

Nothing runs on a stream, but memory is allocated for it, as on real devices. Events are always complete. The time
between two consecutively recorded events is 1 ms, so that programs may divide by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ... import _C
from .devices import check_index, index_of
from .stream_order import Clock, StreamKey, clock_of, clock_of_device, order_after, order_program_after

__all__ = ["STREAMS", "FakeEvent", "FakeStream", "current_stream", "set_stream"]

_recorded_events = itertools.count()

CUDA = 1  # the device type's number (`c10::DeviceType`)


def _fake_class(wrapper: type, fake: type, generic: type) -> Any:
    """Make the class of fakes that pass for instances of `wrapper`, a class in torch.cuda.

    A CUDA build gives `wrapper` its own C layout, and its instances cannot be made without the driver. There the fakes
    only report `wrapper` as their `__class__`, which `isinstance()` accepts.
    """
    has_own_layout = issubclass(wrapper, generic)
    bases = (fake,) if has_own_layout else (fake, wrapper)
    attributes = {"__class__": property(lambda self: wrapper)} if has_own_layout else {}
    return type(wrapper.__name__, bases, {"__module__": "torch.cuda", **attributes})


class _Stream(torch.Stream):
    """A `torch.cuda.Stream` of a fake device."""

    priority = 0

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> _Stream:
        if "stream_id" in kwargs:
            return super().__new__(
                cls, stream_id=kwargs["stream_id"], device_index=kwargs["device_index"], device_type=CUDA
            )
        index = index_of(device)
        if "stream_ptr" in kwargs:  # from `ExternalStream`: the value of `cuda_stream`
            return super().__new__(cls, stream_id=kwargs["stream_ptr"], device_index=index, device_type=CUDA)
        stream = super().__new__(cls, stream_id=_C.new_fake_stream(), device_index=index, device_type=CUDA)
        stream.priority = max(min(priority, 0), cls.priority_range()[1])
        return stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # the base class in a build without CUDA would raise

    @property
    def cuda_stream(self) -> int:
        """The address of the stream, which is its number; 0 for the default stream."""
        return self.stream_id

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Return the lowest and the highest priority, as `CUDAStream::priority_range()`."""
        return 0, -3

    def wait_event(self, event: Any) -> None:
        """Order later work of this stream after the event. This takes no time."""
        if isinstance(event, _Event):
            event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Order later work of this stream after the work issued on `stream` so far. This takes no time."""
        order_after(_key(self), clock_of(_key(stream)))

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, and return it."""
        if event is None:
            event = FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return true: all work is done."""
        return True

    def synchronize(self) -> None:
        """Order later work of the program after the work issued on this stream so far. This takes no time."""
        order_program_after(clock_of(_key(self)), _current_key())

    def __enter__(self) -> _Stream:
        self._previous = (torch.cuda.current_stream(), torch.cuda.current_stream(self.device))
        torch.cuda.set_stream(self)  # type: ignore[arg-type]  # passes for one
        return self

    def __exit__(self, *error: object) -> None:
        current, of_device = self._previous
        torch.cuda.set_stream(of_device)
        torch.cuda.set_device(current.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class _Event(torch.Event):
    """A `torch.cuda.Event` of a fake device."""

    _is_timing: bool
    _is_recorded: bool
    _clock: Clock
    _time: int  # number of events recorded before

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> _Event:
        event = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        event._is_timing = enable_timing
        event._is_recorded = False
        event._clock = {}
        return event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # the base class in a build without CUDA would raise

    def record(self, stream: Any = None) -> None:
        """Record which work has been issued on the stream."""
        self._is_recorded = True
        self._time = next(_recorded_events)
        self._clock = clock_of(_current_key() if stream is None else _key(stream))

    def wait(self, stream: Any = None) -> None:
        """Order later work of the stream after the work that was issued before the event. This takes no time."""
        order_after(_current_key() if stream is None else _key(stream), self._clock)

    def query(self) -> bool:
        """Return true: all work is done."""
        return True

    def synchronize(self) -> None:
        """Order later work of the program after the work that was issued before the event. This takes no time."""
        order_program_after(self._clock, _current_key())

    def elapsed_time(self, end_event: Any) -> float:
        """Return the simulated milliseconds between two events: one for each event that was recorded in between.

        Raises:
            RuntimeError: An event was made without `enable_timing` or has not been recorded.
            TypeError: `end_event` is not a CUDA event.
        """
        if not isinstance(end_event, _Event):
            raise TypeError(f"expected a torch.cuda.Event, got {type(end_event).__name__}")
        if not (self._is_timing and end_event._is_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end_event._is_recorded):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._time - self._time)

    def ipc_handle(self) -> bytes:
        """Raise, because other processes cannot wait for work of fake devices."""
        raise RuntimeError("An event of a fake CUDA device cannot be shared with other processes: nothing runs there.")

    def __repr__(self) -> str:
        return "<torch.cuda.Event>" if self._is_recorded else "<torch.cuda.Event uninitialized>"


FakeStream: Any = _fake_class(torch.cuda.Stream, _Stream, torch.Stream)
FakeEvent: Any = _fake_class(torch.cuda.Event, _Event, torch.Event)


def _key(stream: Any) -> StreamKey:
    return stream.device_index, stream.stream_id


def _current_key() -> StreamKey:
    index = torch.cuda.current_device()
    return index, _C.current_fake_stream(index)


def current_stream(index: int) -> Any:
    """Return the current stream of a device on this thread."""
    check_index(index)
    return FakeStream(stream_id=_C.current_fake_stream(index), device_index=index, device_type=CUDA)


def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Make a stream and its device current on this thread."""
    torch.cuda.set_device(device_index)
    _C.set_current_fake_stream(device_index, stream_id)


def _stream(stream_id: int | None, index: int) -> tuple[int, int, int]:
    """Describe a stream, or the current one, of a device, or of the current one (`getCurrentCUDAStream()`)."""
    index = torch.cuda.current_device() if index == -1 else index
    check_index(index)
    return _C.current_fake_stream(index) if stream_id is None else stream_id, index, CUDA


def _synchronize() -> None:
    """Order later work of the program after all work issued on the current device so far. This takes no time."""
    order_program_after(clock_of_device(torch.cuda.current_device()), _current_key())


STREAMS: dict[str, Callable[..., Any]] = {
    "_cuda_getCurrentRawStream": _C.current_fake_stream,
    "_cuda_getCurrentStream": lambda index: _stream(None, index),
    "_cuda_getDefaultStream": lambda index: _stream(0, index),
    "_cuda_getStreamFromExternal": lambda pointer, index: _stream(pointer, index),
    "_cuda_setStream": set_stream,
    "_cuda_sleep": lambda cycles: None,
    "_cuda_synchronize": _synchronize,
}
