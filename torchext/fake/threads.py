"""Threads that work in the blocks of the thread that starts them.

`fake_mode()` and `world()` hold for one thread, like grad mode, autocast and the current device in PyTorch. Only two
things carry over to another thread: the fake devices, and that factories make fakes. A new thread begins on device 0,
records gradients and does not autocast, like threads of a program with real devices.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .. import _C
from ..internals.leases import Lease, while_fakes_live
from ..internals.patching import Function
from .cuda import functions
from .fake_tensor_mode import fakes_on_this_thread

__all__ = ["carry_blocks", "carry_blocks_to_threads"]

P = ParamSpec("P")
T = TypeVar("T")


class _Thread(threading.local):
    carries = False  # whether threads started by this one get its blocks


_thread_state = _Thread()


class _Blocks(NamedTuple):
    """The open blocks of a thread."""

    makes_fakes: bool
    devices: int
    gpu: _C.GpuFields
    traces_lines: bool
    carries: bool

    @classmethod
    def of_this_thread(cls) -> _Blocks:
        scope = _C.set_memory_scope(-1, 0, False)
        _C.set_memory_scope(*scope)
        return cls(
            _C.are_factories_fake(),
            _C.fake_cuda_devices(),
            _C.fake_gpu(),
            scope[2],
            _thread_state.carries,
        )

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        if not (self.makes_fakes or self.devices):
            yield
            return
        outer, carries = _C.set_memory_scope(-1, _OTHER_PHASE, self.traces_lines), _thread_state.carries
        _thread_state.carries = self.carries
        try:
            with while_fakes_live.hold(), functions.same_devices(self.devices, self.gpu):
                if self.makes_fakes:
                    with fakes_on_this_thread():
                        yield
                else:
                    yield
        finally:
            _thread_state.carries = carries
            _C.set_memory_scope(*outer)


_OTHER_PHASE = 3  # `MemoryPhase::kOther` (csrc/extensions/memory/timeline.h), the initial phase of a thread


def carry_blocks(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs `function` on any thread, in the blocks that are open on this thread now.

    The blocks are those of `fake_mode()` and `world()`. They are open on the other thread only while `function` runs
    there, even if this thread has left them in the meantime. PyTorch's own state of the thread (grad mode, autocast,
    inference mode, the current device) is not carried over.

    Args:
        function: The function for the other thread.

    Returns:
        A function with the same arguments and results.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with fake_mode(gpu=2), ThreadPoolExecutor() as pool:
        ...     pool.submit(carry_blocks(torch.ones), 4, device="cuda:1").result().device
        device(type='cuda', index=1)
    """
    blocks = _Blocks.of_this_thread()

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with blocks.on_this_thread():
            return function(*args, **kwargs)

    return run


@contextmanager
def carry_blocks_to_threads() -> Iterator[None]:
    """Let threads that are started in the block, and their threads, be in the blocks of the thread that starts them.

    This is for threads that libraries start. A thread is in these blocks until it ends, even if they are left before.
    Shut down thread pools inside the block. `python -m torchext.dry_run` and `torchext.memory.fits()` do this for the
    whole program.
    """
    carries, _thread_state.carries = _thread_state.carries, True
    try:
        with _while_threads_are_carried.hold():
            yield
    finally:
        _thread_state.carries = carries


_while_threads_are_carried = Lease("a block of carry_blocks_to_threads() is open")
STARTS = "starts threads that are in no block"


# `threading` calls the first since Python 3.13, and the second before.
@_while_threads_are_carried.replaces(_thread, "start_joinable_thread", needs="start_joinable_thread", reason=STARTS)
@_while_threads_are_carried.replaces(_thread, "start_new_thread", reason=STARTS)
def _start(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    if not _thread_state.carries:
        return original(*args, **kwargs)
    if args:
        return original(carry_blocks(args[0]), *args[1:], **kwargs)
    return original(**{**kwargs, "function": carry_blocks(kwargs["function"])})
