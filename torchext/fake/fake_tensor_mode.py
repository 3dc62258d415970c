"""Combines our fake mode with PyTorch's `FakeTensorMode` on one thread: the innermost applies.

Without this, `FakeTensorMode` would call Meta kernels whose factories our mode makes fake, and its tensors would be
both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from .. import _C
from ..internals.leases import while_fakes_live
from ..internals.patching import Concerns

__all__ = ["fakes_on_this_thread", "install"]


class _Thread(threading.local):
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


def install() -> None:
    """Suspend our mode in the blocks of `FakeTensorMode`, and where it converts tensors."""
    reason = "calls Meta kernels whose factories our mode makes fake"
    while_fakes_live.patch(FakeTensorMode, "__enter__", _suspending, reason)
    while_fakes_live.patch(FakeTensorMode, "__exit__", _resuming, reason)
    while_fakes_live.patch(FakeTensorMode, "from_tensor", _suspending_meanwhile, reason)
    _patch_reads_of_inputs()
    if hasattr(torch._C, "_is_fake_tensor"):
        _patch_tracing()


def _suspending(original: Callable[..., FakeTensorMode]) -> Callable[..., FakeTensorMode]:
    def __enter__(self: FakeTensorMode) -> FakeTensorMode:
        entered = original(self)
        _suspend()
        return entered

    return __enter__


def _resuming(original: Callable[..., None]) -> Callable[..., None]:
    def __exit__(self: FakeTensorMode, *error: Any) -> None:
        _resume()
        original(self, *error)

    return __exit__


def _suspending_meanwhile(original: Callable[..., FakeTensor]) -> Callable[..., FakeTensor]:
    def from_tensor(self: FakeTensorMode, *args: Any, **kwargs: Any) -> FakeTensor:
        _suspend()
        try:
            return original(self, *args, **kwargs)
        finally:
            _resume()

    return from_tensor


def _patch_reads_of_inputs() -> None:
    """Dynamo reads integer inputs without dimensions, such as the counter of `torch.nn.BatchNorm1d`."""

    def make(original: Callable[[object], bool]) -> Callable[[object], bool]:
        def _is_plain_tensor(t: object) -> bool:
            has_value = not (isinstance(t, torch.Tensor) and _C.is_fake(t)) or _C.is_deferred(t)
            return has_value and original(t)

        return _is_plain_tensor

    while_fakes_live.patch(fake_tensor, "_is_plain_tensor", make, "decides if item() works", concerns=Concerns.FAKES)


def _patch_tracing() -> None:
    """Since 2.14 `make_fx()` assumes that any tensor with the `Fake` key belongs to a `FakeTensorMode`."""

    def make(original: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def snapshot_fake(val: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            if isinstance(val, FakeTensor) or not _C.is_fake(val):
                return original(val, *args, **kwargs)
            return val.detach()

        return snapshot_fake

    module = torch.fx.experimental.proxy_tensor
    while_fakes_live.patch(module, "snapshot_fake", make, "assumes that the Fake key marks PyTorch's FakeTensors")
