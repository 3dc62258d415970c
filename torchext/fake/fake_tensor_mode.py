"""The blocks of fakes on a thread: with PyTorch's `FakeTensorMode` and on threads that the program starts.

The innermost of our blocks and of `FakeTensorMode` blocks applies. Without this, `FakeTensorMode` would call Meta
kernels whose factories our mode makes fake, and its tensors would be both.
"""

from __future__ import annotations

import _thread as thread_module
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from .. import _C
from ..internals.held_tensors import parts_of
from ..internals.leases import Lease, while_fakes_live
from ..internals.patching import Concerns, Function
from .cuda import functions

__all__ = ["fakes_on_this_thread", "inherit_blocks", "is_fake_tensor", "is_wrapper_of_fakes", "threads_inherit_blocks"]


class _Thread(threading.local):
    carries = False  # whether threads started by this one get its blocks

    def __init__(self) -> None:
        # Number of times our mode has been entered since the last FakeTensorMode.
        self.depth = 0
        # The value of `depth` when each FakeTensorMode was entered.
        self.suspended: list[int] = []


_thread = _Thread()


@contextmanager
def fakes_on_this_thread() -> Iterator[None]:
    """Enter our fake mode and leave any `FakeTensorMode` in the block."""
    with unset_fake_temporarily():
        _enter(1)
        try:
            yield
        finally:
            _leave(1)


def _enter(times: int) -> None:
    for _ in range(times):
        _C.enter_fake_mode()
    _thread.depth += times


def _leave(times: int) -> None:
    for _ in range(times):
        _C.leave_fake_mode()
    _thread.depth -= times


def _suspend() -> None:
    while_fakes_live.acquire()  # keeps the patches until the end of the block
    _thread.suspended.append(_thread.depth)
    _leave(_thread.depth)


def _resume() -> None:
    if _thread.suspended:  # else it was entered before the process's first fake mode
        _enter(_thread.suspended.pop())
        while_fakes_live.release()


# ---- Our mode is suspended in the blocks of `FakeTensorMode`, and where it converts tensors


MAKES_FAKES = "calls Meta kernels whose factories our mode makes fake"


@while_fakes_live.replaces(FakeTensorMode, "__enter__", reason=MAKES_FAKES)
def _enter_mode(original: Function, self: FakeTensorMode) -> Any:
    entered = original(self)
    _suspend()
    return entered


@while_fakes_live.replaces(FakeTensorMode, "__exit__", reason=MAKES_FAKES)
def _exit_mode(original: Function, self: FakeTensorMode, *error: Any) -> None:
    _resume()
    original(self, *error)


@while_fakes_live.replaces(FakeTensorMode, "from_tensor", reason=MAKES_FAKES)
def _from_tensor(original: Function, /, self: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    _suspend()
    try:
        return original(self, *args, **kwargs)
    finally:
        _resume()


# ---- Checks for FakeTensors in PyTorch and in the package transformers


@while_fakes_live.replaces(fake_tensor, "_is_plain_tensor", reason="decides if item() works", concerns=Concerns.FAKES)
def _is_plain_tensor(original: Function, t: object) -> Any:
    """Dynamo reads integer inputs without dimensions, such as the counter of `torch.nn.BatchNorm1d`."""
    has_value = not (isinstance(t, torch.Tensor) and _C.is_fake(t)) or _C.is_deferred(t)
    return has_value and original(t)


if hasattr(torch._C, "_is_fake_tensor"):

    @while_fakes_live.replaces(
        proxy_tensor, "snapshot_fake", reason="assumes that the Fake key marks PyTorch's FakeTensors"
    )
    def _snapshot_fake(original: Function, /, val: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Since 2.14 `make_fx()` assumes this."""
        if isinstance(val, FakeTensor) or not _C.is_fake(val):
            return original(val, *args, **kwargs)
        return val.detach()


@while_fakes_live.replaces(
    "transformers.utils.import_utils",
    "is_fake_tensor",
    needs="is_fake_tensor",
    reason="transformers reads values of masks unless they are fake",
)
def _is_fake_for_transformers(original: Function, x: Any) -> bool:
    """Transformers then skips checks that read values, for example of attention masks."""
    ours = isinstance(x, torch.Tensor) and _C.is_fake(x) and not _C.is_deferred(x)
    return ours or bool(original(x))


# ---- Our checks, for patched functions, whose arguments can be any object


def is_fake_tensor(obj: object) -> bool:
    """Return true if `obj` is a tensor, and a fake one."""
    return isinstance(obj, torch.Tensor) and _C.is_fake(obj)


def is_wrapper_of_fakes(obj: object) -> bool:
    """Return true if `obj` is a wrapper, such as a DTensor, of fakes that are not deferred."""
    if not isinstance(obj, torch.Tensor) or _C.is_fake(obj):
        return False
    return any(_C.is_fake(member) and not _C.is_deferred(member) for member in parts_of(obj) if member is not obj)


# ---- Threads that work in the blocks of the thread that starts them
#
# `fake_mode()` and `world()` hold for one thread, like grad mode, autocast and the current device in PyTorch. Only two
# things carry over to another thread: the fake devices, and that factories make fakes. A new thread begins on device 0,
# records gradients and does not autocast, like threads of a program with real devices.


P = ParamSpec("P")
T = TypeVar("T")


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
        return cls(_C.are_factories_fake(), _C.fake_cuda_devices(), _C.fake_gpu(), scope[2], _thread.carries)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        if not (self.makes_fakes or self.devices):
            yield
            return
        outer, carries = _C.set_memory_scope(-1, _OTHER_PHASE, self.traces_lines), _thread.carries
        _thread.carries = self.carries
        try:
            with while_fakes_live.hold(), functions.same_devices(self.devices, self.gpu):
                if self.makes_fakes:
                    with fakes_on_this_thread():
                        yield
                else:
                    yield
        finally:
            _thread.carries = carries
            _C.set_memory_scope(*outer)


_OTHER_PHASE = 3  # `MemoryPhase::kOther` (csrc/extensions/memory/timeline.h), the initial phase of a thread


def inherit_blocks(function: Callable[P, T]) -> Callable[P, T]:
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
        ...     pool.submit(inherit_blocks(torch.ones), 4, device="cuda:1").result().device
        device(type='cuda', index=1)
    """
    blocks = _Blocks.of_this_thread()

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with blocks.on_this_thread():
            return function(*args, **kwargs)

    return run


@contextmanager
def threads_inherit_blocks() -> Iterator[None]:
    """Let threads that are started in the block, and their threads, be in the blocks of the thread that starts them.

    This is for threads that libraries start. A thread is in these blocks until it ends, even if they are left before.
    Shut down thread pools inside the block. `torchext dry-run` and `torchext.memory.fits()` do this for the whole
    program.
    """
    carries, _thread.carries = _thread.carries, True
    try:
        with _while_threads_are_carried.hold():
            yield
    finally:
        _thread.carries = carries


_while_threads_are_carried = Lease("a block of threads_inherit_blocks() is open")
STARTS = "starts threads that are in no block"


# `threading` calls the first since Python 3.13, and the second before.
@_while_threads_are_carried.replaces(
    thread_module, "start_joinable_thread", needs="start_joinable_thread", reason=STARTS
)
@_while_threads_are_carried.replaces(thread_module, "start_new_thread", reason=STARTS)
def _start(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    if not _thread.carries:
        return original(*args, **kwargs)
    if args:
        return original(inherit_blocks(args[0]), *args[1:], **kwargs)
    return original(**{**kwargs, "function": inherit_blocks(kwargs["function"])})
