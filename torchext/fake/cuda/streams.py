"""Streams, events, CUDA graphs and memory pools of fake devices, and the order of work on streams.

Nothing runs on a stream, but memory is allocated for it, as on real devices.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import _C
from .devices import check_index, index_of

__all__ = [
    "GRAPHS",
    "STREAMS",
    "Clock",
    "FakeEvent",
    "FakeGraph",
    "FakePool",
    "FakeStream",
    "StreamKey",
    "clock_of",
    "current_stream",
    "graph_observers",
    "is_put_off",
    "listeners",
    "replay_observers",
    "set_stream",
]


# ---- Order of work: streams wait for events, as on a GPU
#
# The core counts the operators that a program has issued on each stream. A clock holds the number of operators of each
# stream that complete before other work begins.


STREAMS_PER_DEVICE = 32  # per device besides the default stream, as in csrc/extensions/cuda/fake_cuda.cpp

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


def _clock_of_device(index: int) -> Clock:
    """Return the clock at which all work issued on the device `index` so far is done."""
    return {
        stream: _C.work_on_fake_stream(*stream)
        for stream in [(index, number) for number in range(STREAMS_PER_DEVICE + 1)]
    }


def _order_after(stream: StreamKey, clock: Clock) -> None:
    """Let later work on `stream` begin after `clock`."""
    _advance(_known.setdefault(stream, dict(_of_program)), clock)
    for listener in listeners:
        listener(stream, clock)


def _order_program_after(clock: Clock, stream: StreamKey) -> None:
    """Let later work of the program, on any stream, begin after `clock`. `stream` is its current stream."""
    _advance(_of_program, clock)
    for known in _known.values():
        _advance(known, clock)
    _order_after(stream, clock)


def _advance(clock: Clock, later: Clock) -> None:
    for stream, count in later.items():
        clock[stream] = max(clock.get(stream, 0), count)


# ---- Streams and events
#
# Events are always complete. The time between two consecutively recorded events is 1 ms, so that programs may divide by
# it.


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
        _order_after(_key(self), clock_of(_key(stream)))

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
        _order_program_after(clock_of(_key(self)), _current_key())

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
        _order_after(_current_key() if stream is None else _key(stream), self._clock)

    def query(self) -> bool:
        """Return true: all work is done."""
        return True

    def synchronize(self) -> None:
        """Order later work of the program after the work that was issued before the event. This takes no time."""
        _order_program_after(self._clock, _current_key())

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
    _order_program_after(_clock_of_device(torch.cuda.current_device()), _current_key())


STREAMS: dict[str, Callable[..., Any]] = {
    "_cuda_getCurrentRawStream": _C.current_fake_stream,
    "_cuda_getCurrentStream": lambda index: _stream(None, index),
    "_cuda_getDefaultStream": lambda index: _stream(0, index),
    "_cuda_getStreamFromExternal": lambda pointer, index: _stream(pointer, index),
    "_cuda_setStream": set_stream,
    "_cuda_sleep": lambda cycles: None,
    "_cuda_synchronize": _synchronize,
}


# ---- CUDA graphs and memory pools
#
# Capturing a graph runs its body once and allocates in the graph's own pool. Replaying it computes nothing, because the
# tensors that it writes exist already. Observers that count operations can count them at each replay.


PoolId = tuple[int, int]

_numbers = itertools.count(1)

# Called with a graph after its capture.
graph_observers: list[Callable[[], object]] = []

# Called when a graph is replayed.
replay_observers: list[Callable[[], object]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.capturing: list[FakeGraph] = []


_thread = _Thread()


def is_put_off(call: Callable[[], object]) -> bool:
    """Return true if this thread captures a graph, which then calls `call` at each replay."""
    if not _thread.capturing:
        return False
    _thread.capturing[-1].on_replay.append(call)
    return True


def graph_pool_handle() -> PoolId:
    """Return the name of a new pool, numbered like PyTorch's pools of graphs."""
    return 0, next(_numbers)


def is_capturing() -> bool:
    """Return true if a graph is captured on the current stream, and always to `SyncBatchNorm`."""
    index = torch.cuda.current_device()
    return _is_sync_batch_norm_calling() or any(
        graph.stream == (index, _C.current_fake_stream(index)) for graph in _thread.capturing
    )


def _is_sync_batch_norm_calling() -> bool:
    """Return true if `SyncBatchNorm` is calling: without a capture it looks for ranks without input."""
    asks = torch.nn.modules._functions.SyncBatchNorm.forward.__code__
    frame = sys._getframe()
    for _ in range(4):  # the replaced function and its replacement come in between
        frame = frame.f_back or frame
        if frame.f_code is asks:
            return True
    return False


class FakeGraph:
    """A `torch.cuda.CUDAGraph` of a fake device."""

    # Makes `isinstance()` work, as for streams.
    __class__ = property(lambda self: torch.cuda.CUDAGraph)
    __module__ = "torch.cuda.graphs"

    def __init__(self, keep_graph: bool = False) -> None:
        self.stream: StreamKey = (-1, -1)
        self.on_replay: list[Callable[[], object]] = []
        self._pool: PoolId | None = None
        self._is_captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        """Allocate from the pool from now on.

        Raises:
            RuntimeError: A graph exists already, or the default stream is current.
        """
        index = torch.cuda.current_device()
        stream = _C.current_fake_stream(index)
        if self._pool is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        self.stream = (index, stream)
        self._pool = graph_pool_handle() if pool is None else tuple(pool)
        _C.cuda_enter_pool(index, self._pool)
        _thread.capturing.append(self)

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: No capture has begun, or another stream is current.
        """
        index = torch.cuda.current_device()
        if self._pool is None or self not in _thread.capturing or self.stream != (index, _C.current_fake_stream(index)):
            raise RuntimeError("Capture must end on the same stream it began on.")
        _thread.capturing.remove(self)
        _C.cuda_leave_pool(index, self._pool)
        self._is_captured = True
        for observe in graph_observers:
            observe()

    def instantiate(self) -> None:
        """Do nothing."""

    def replay(self) -> None:
        """Compute nothing.

        Raises:
            RuntimeError: Nothing has been captured.
        """
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for observe in [*replay_observers, *self.on_replay]:
            observe()

    def reset(self) -> None:
        """Release the pool, which keeps its live allocations."""
        pool, self._pool = self._pool, None
        self.on_replay.clear()
        if pool is None:
            return
        if self in _thread.capturing:
            _thread.capturing.remove(self)
            _C.cuda_leave_pool(self.stream[0], pool)
        self._is_captured = False
        _C.cuda_release_pool(self.stream[0], pool)

    def pool(self) -> PoolId:
        """Return the name of the pool.

        Raises:
            RuntimeError: Nothing has been captured.
        """
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Do nothing."""

    def debug_dump(self, debug_path: str) -> None:
        """Raise, because there is no graph of the driver."""
        raise RuntimeError("A CUDA graph of a fake device cannot be dumped: no kernels are recorded.")

    def raw_cuda_graph(self) -> int:
        """Raise, because there is no graph of the driver."""
        raise RuntimeError("A CUDA graph of a fake device has no cudaGraph_t: no kernels are recorded.")

    raw_cuda_graph_exec = raw_cuda_graph

    def __del__(self) -> None:
        if self._pool is not None:
            self.reset()


class FakePool:
    """A `torch.cuda.MemPool` of fake devices with PyTorch's caching allocator."""

    __class__ = property(lambda self: torch.cuda.MemPool)
    __module__ = "torch.cuda.memory"

    def __init__(self, allocator: Any = None, *args: Any, **kwargs: Any) -> None:
        if allocator is not None:
            raise RuntimeError(
                "A memory pool with another allocator cannot be used on fake CUDA devices: only PyTorch's caching "
                "allocator is simulated there. Run the program without it."
            )
        self._id: PoolId = (next(_numbers), 0)
        self._device = torch.cuda.current_device()
        _C.cuda_enter_pool(self._device, self._id)
        _C.cuda_leave_pool(self._device, self._id)
        _users[self._id] = 1

    @property
    def id(self) -> PoolId:
        """The name of the pool."""
        return self._id

    @property
    def allocator(self) -> None:
        """Always None: other allocators are not supported."""
        return

    def use_count(self) -> int:
        """Return the number of users of the pool, including this object."""
        return _users[self._id]

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the segments of the pool."""
        return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == self._id]

    def __del__(self) -> None:
        if hasattr(self, "_device"):
            _C.cuda_release_pool(self._device, self._id)
            del _users[self._id]


_users: Counter[PoolId] = Counter()


@contextmanager
def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
    """Allocate from the pool in the block."""
    index = index_of(device)
    _C.cuda_enter_pool(index, pool.id)
    _users[pool.id] += 1
    try:
        yield
    finally:
        _users[pool.id] -= 1
        _C.cuda_leave_pool(index, pool.id)
        _C.cuda_release_pool(index, pool.id)


GRAPHS: dict[str, Callable[..., Any]] = {
    "graph_pool_handle": graph_pool_handle,
    "is_current_stream_capturing": is_capturing,
    "use_mem_pool": use_mem_pool,
}
