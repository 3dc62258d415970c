"""CUDA graphs and memory pools of fake devices.

Capturing a graph runs its body once and allocates in the graph's own pool. Replaying it computes nothing, because the
tensors that it writes exist already. Observers that count operations can count them at each replay.
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
from .devices import index_of

__all__ = ["GRAPHS", "FakeGraph", "FakePool", "graph_observers", "is_put_off", "replay_observers"]

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
        self.stream = (-1, -1)
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
